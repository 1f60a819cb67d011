"""The texts and the models of the benchmarks.

Texts are real ones of the corpora, since the cost of padding depends on how lengths spread. Models are real too, or
random ones of the same architecture where only speed matters: that changes the constants, not the slopes.
"""
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from anchor_nb.core.progress import without_bars
from anchor_nb.data.corpora import build_corpus
from anchor_nb.data.packages import cache_dir
from anchor_nb.data.prompts import Formatter, load_formatter
from anchor_nb.models.attention import on_gpu
from anchor_nb.models.resolve import resolve_model
from anchor_nb.training.flops import SHAPES, Shape


def corpus_rows(name: str, count: int, negatives: int = 0) -> list:  # of dictionaries
    "The first rows of a corpus with so many hard negatives at least; ValueError when it has fewer rows."
    with open(build_corpus(name)/"pairs"/f"{name}.jsonl", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if len(row["negatives"]) >= negatives][:count]
    if len(rows) < count:
        raise ValueError(f"{name} has {len(rows)} such pairs, not {count}; take a larger corpus or fewer pairs")
    return rows


def write_rows(path: Path, rows) -> str:  # the path
    "A JSONL file."
    with open(path, "w", encoding="utf-8") as file: file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def repeated(rows: list, count: int):  # rows with query and positive
    "`count` rows out of fewer, with a number behind each query so that no two are alike."
    for k in range(count):
        row = rows[k % len(rows)]
        yield dict(query=f"{row['query']} {k}", positive=row["positive"])


def text_mix(mix: str, corpora: list, count: int, formatter: Formatter) -> list:  # of strings
    """Texts with a certain distribution of lengths, the same every time.

    short: queries. uniform: documents cut to one number of tokens, where packing gains nothing. mixed: queries and
    documents, as a retrieval evaluation meets them. long: documents joined until they pass the limit.
    """
    rows = [row for name in corpora for row in corpus_rows(name, -(-count//len(corpora)))]
    random.Random(0).shuffle(rows)
    queries = [row["query"].strip() for row in rows]
    documents = [row["positive"].strip() for row in rows]
    most = formatter.layout.max_length
    if mix == "short": return queries[:count]
    if mix == "mixed": return [documents[k] if k % 2 else queries[k] for k in range(count)]
    if mix == "uniform": return same_length(documents, count, formatter, most//2)
    if mix == "long":
        joined = [[documents[(k + j) % len(documents)] for j in range(most//40 + 1)] for k in range(count)]
        return [" ".join(texts)[:8*most] for texts in joined]
    raise ValueError(f"no mix {mix!r}; there are short, uniform, mixed, long")


def same_length(documents: list, count: int, formatter: Formatter, tokens: int) -> list:  # of strings
    "Pieces of documents that have exactly `tokens` tokens, template included; a small corpus is used repeatedly."
    content, pieces = tokens - formatter.head - formatter.tail, []
    stream = [i for text in formatter(documents) for i in text.content]
    for start in range(0, len(stream) - content, content):
        text = formatter.tokenizer.decode(stream[start:start + content]).strip()
        if len(formatter([text])[0].ids) == tokens: pieces.append(text)
        if len(pieces) == count: break
    return [pieces[k % len(pieces)] for k in range(count)]


def formatter_of(model: str, max_length: int) -> Formatter:
    "A model's formatter at a length, without the model."
    formatter = load_formatter(resolve_model(model))
    return Formatter(formatter.tokenizer, replace(formatter.layout, max_length=max_length))


def llama_config(shape: Shape, **tokens) -> LlamaConfig:
    "The configuration of a Llama of these sizes; heads are 64 wide in small models and 128 in others."
    size = 128 if shape.query % 128 == 0 and shape.layers > 20 else 64
    return LlamaConfig(vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.mlp,
                       num_hidden_layers=shape.layers, num_attention_heads=shape.query//size,
                       num_key_value_heads=shape.key//size, head_dim=size, max_position_embeddings=4096,
                       tie_word_embeddings=shape.tied, bos_token_id=None, **tokens)


def random_model(folder: Path, shape: Shape, source: str) -> str:  # the folder; source: a model whose tokenizer it gets
    "A Llama of these sizes with random weights, made once."
    if (folder/"tokenizer.json").is_file(): return str(folder)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(source))
    if len(tokenizer) > shape.vocabulary:
        raise ValueError(f"the tokenizer of {source} has {len(tokenizer)} ids, too many for a vocabulary of "
                         f"{shape.vocabulary}")
    torch.manual_seed(0)
    config = llama_config(shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    large = shape.parameters > 1e9
    torch.set_default_dtype(torch.bfloat16 if large else torch.float32) # 8 B weights in fp32 fill a card of 32 GB
    try: # billions of random numbers take minutes on a CPU
        with torch.device("cuda" if large and on_gpu() else "cpu"): model = LlamaForCausalLM(config)
    finally: torch.set_default_dtype(torch.float32)
    with without_bars(): model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bench_model(model: str) -> str:  # folder, hub id or short name
    "A model, or for `random:NAME` one of the planner's sizes with random weights, which are as fast as trained ones."
    kind, _, name = model.partition(":")
    if kind != "random": return model
    if name not in SHAPES:
        raise ValueError(f"no sizes of {name!r}; there are {', '.join('random:' + name for name in SHAPES)}")
    return random_model(cache_dir()/"models"/f"random-{name}", SHAPES[name], "smollm2-135m")
