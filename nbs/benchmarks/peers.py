"""How others do the same work: padded passes, sentence-transformers, and a loop sorted by characters.

Each peer gets the token ids that our formatter writes and the settings that its makers would choose.
tests/benchmarks shows that each gives our loss, our gradient or our vectors. sentence-transformers and what it needs
are imported where they are used: a machine without them can measure everything else.
"""
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PrinterCallback

from anchor_nb.core.recipe import Stage2
from anchor_nb.data.corpora import training_instructions
from anchor_nb.data.prompts import Formatter
from anchor_nb.data.rows import examples
from anchor_nb.losses.reconstruction import DecodeRules, count_targets
from anchor_nb.experiments.parity import decode_padded
from anchor_nb.models.attention import installed_flash
from anchor_nb.training.steps import ReconstructionStep
from anchor_nb.training.inputs import Inputs

# ---- stage I with padding ----


class PaddedStep(ReconstructionStep):
    "Stage I's step by four padded passes with full logits; same loss and gradient as its parent, in one process only."
    def run(self, model, items: dict, backward, sync, device) -> dict:  # facts to log, as the parent's
        pairs, eos = items["anchor"][0], closing(self.formatter)
        totals = count_targets(pairs, DecodeRules(), eos)
        write = lambda source, target: decode_padded(model.lm, [pair[source].ids for pair in pairs],
                                                     [pair[target].content + [eos] for pair in pairs])
        q2d, d2q = write(0, 1)/totals[0], write(1, 0)/totals[1]
        alpha = model.objectives["anchor"].alpha
        with sync(True): backward(alpha*q2d + (1 - alpha)*d2q)
        return dict(loss_q2d=q2d.item(), loss_d2q=d2q.item(), target_tokens_q2d=totals[0], target_tokens_d2q=totals[1],
                    tokens=sum(map(sum, pass_lengths(pairs, eos, padded=True))))


def closing(formatter: Formatter) -> int:
    "The id of [EOS]."
    return formatter.tokenizer.convert_tokens_to_ids(formatter.layout.eos)


def pass_lengths(pairs: list,  # of (query, document), both `prompts.Tokens`
                 eos: int,     # id of [EOS]
                 padded: bool, # rows of the naive step, or packed texts
                ) -> tuple:    # (tokens of each text to encode, tokens of each text to decode)
    "How many tokens of each text go through the layers in a step of stage I; packing drops the last, no input."
    encode = [[len(pair[side].ids) for pair in pairs] for side in (0, 1)]
    decode = [[len(pair[side].content) + (pair[side].ids[-1] == eos) for pair in pairs] for side in (1, 0)]
    widen = lambda lengths, anchor: [max(lengths) + anchor]*len(lengths) if padded else lengths
    return sum([widen(lengths, 0) for lengths in encode], []), sum([widen(lengths, 1) for lengths in decode], [])


# ---- encoding ----

# Without this, a tokenizer with a chat template is used through messages: slower, and with other ids.
TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def sentence_transformer(folder: str, formatter: Formatter, dtype: str = "float32", device: str = "cpu",
                         autocast: bool = False):  # -> a `SentenceTransformer`
    "A `SentenceTransformer` that reads the same token ids and pools the same state; autocast: it will run under bf16."
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    half = "cuda" in device and (autocast or dtype != "float32")
    attention = [*installed_flash()*half, "sdpa"][0]
    body = Transformer(folder, model_kwargs=dict(dtype=dtype, attn_implementation=attention), modality_config=TEXT_ONLY,
                       module_output_name="token_embeddings")
    body.processor = formatter.tokenizer
    body.processor.padding_side = "right"
    if body.processor.pad_token is None: body.processor.pad_token = formatter.layout.eos
    return SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension(), "lasttoken"), Normalize()],
                               device=device)


def is_unpadded(model) -> bool:
    "Whether a `SentenceTransformer` packs texts, which it does where a FlashAttention package is installed."
    return "cu_seq_lens_q" in model.preprocess(["a"])


def fingerprint(sequences) -> str:  # of lists of token ids, in order
    "A short name for exactly these token ids."
    return hashlib.sha256(repr([list(ids) for ids in sequences]).encode()).hexdigest()[:16]


def their_ids(model, texts: list) -> list:  # of lists of token ids
    "The token ids that sentence-transformers makes of texts with their instructions, padding removed."
    ids = []
    for k in range(0, len(texts), 256):
        part = model.preprocess(texts[k:k + 256])
        if "cu_seq_lens_q" in part:  # with flash attention, texts come packed
            rows = part["input_ids"][0].tensor_split(part["cu_seq_lens_q"][1:-1].long())
        else: rows = [row[mask.bool()] for row, mask in zip(part["input_ids"], part["attention_mask"])]
        ids += [row.tolist() for row in rows]
    return ids


@torch.inference_mode()
def encode_padded(trunk, formatter: Formatter, texts: list, batch: int = 32) -> np.ndarray:  # [texts, hidden] fp32
    """Encode padded batches of texts sorted by characters, longest first, to length 1, as LLM2Vec and many scripts do.

    `trunk` is a decoder without head, with transformers' own attention; 32 is LLM2Vec's default. Characters are a poor
    measure of tokens, so batches keep some padding. Our own writing of that loop, without LLM2Vec's processes.
    """
    order, vectors = np.argsort([-len(text) for text in texts], kind="stable"), []
    device = next(trunk.parameters()).device
    for k in range(0, len(texts), batch):
        rows = formatter.tokenizer([texts[n] for n in order[k:k + batch]], padding=True, truncation=True,
                                   return_tensors="pt").to(device)
        states = trunk(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"],
                       use_cache=False).last_hidden_state
        last = rows["attention_mask"].sum(1) - 1
        vectors.append(F.normalize(states[torch.arange(len(last), device=device), last].float(), dim=-1).cpu())
    return torch.cat(vectors)[np.argsort(order)].numpy()


# ---- training in stage II ----


def add_their_lora(model, recipe: Stage2):
    "Our recipe's adapters, with the same random start."
    from peft import LoraConfig
    torch.manual_seed(recipe.seed)
    model.add_adapter(LoraConfig(r=recipe.lora_rank, lora_alpha=recipe.lora_alpha, lora_dropout=recipe.lora_dropout,
                                 target_modules="all-linear", bias="none", task_type="FEATURE_EXTRACTION"))


def triplets(recipe: Stage2, inputs: Inputs) -> list:  # of dictionaries anchor, positive, negative
    "What our stage II trains on, in its order; ValueError for an example without a hard negative."
    join, rows = inputs.formatter.join, []
    for step in range(recipe.steps):
        batch = inputs.batches(step)
        instructions = training_instructions(recipe.instructions)
        for e in examples(inputs.tables[batch.dataset], batch, instructions, recipe.negatives):
            if len(e.negatives) != 1:
                raise ValueError(f"{batch.dataset} has an example with {len(e.negatives)} hard negatives; this "
                                 "comparison needs negatives=1 and rows with at least one")
            rows.append(dict(anchor=join(e.query, e.instruction)[0],
                             positive=join(e.positive, e.document_instruction)[0],
                             negative=join(e.negatives[0], e.document_instruction)[0]))
    return rows


SHARED = ("learning_rate", "warmup_steps", "lr_scheduler_type", "weight_decay", "max_grad_norm", "max_steps", "seed",
          "bf16", "use_cpu", "optim", "logging_steps", "disable_tqdm", "dataloader_num_workers", "report_to")


def in_order(dataset, batch_size: int, drop_last: bool, **unused):
    "A batch sampler that reads a table from front to back."
    from sentence_transformers.base.sampler import DefaultBatchSampler
    return DefaultBatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size, drop_last)


def their_trainer(model,              # a `SentenceTransformer` with adapters
                  rows: list,         # from `triplets`
                  recipe: Stage2,
                  arguments,          # our `TrainingArguments` for this recipe
                  mini_batch: int = 0, # texts in a piece of the cached loss (its default: 32); 0: the plain loss
                 ):                   # -> a `SentenceTransformerTrainer`
    "Stage II by sentence-transformers; both of its losses are InfoNCE with in-batch and hard negatives."
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import (CachedMultipleNegativesRankingLoss,
                                                                   MultipleNegativesRankingLoss)
    from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardCallback
    scale = 1/recipe.temperature
    if mini_batch: loss = CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=mini_batch)
    else: loss = MultipleNegativesRankingLoss(model, scale=scale)
    args = SentenceTransformerTrainingArguments(output_dir=str(Path(recipe.out)/"sentence-transformers"),
                                                per_device_train_batch_size=recipe.global_batch,
                                                batch_sampler=in_order, save_strategy="no",
                                                **{name: getattr(arguments, name) for name in SHARED})
    args._n_gpu = min(args.n_gpu, 1)  # as ours: no DataParallel
    trainer = SentenceTransformerTrainer(model, args, train_dataset=datasets.Dataset.from_list(rows), loss=loss)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(SentenceTransformerModelCardCallback)  # describes the model for a hub; no part of training
    return trainer
