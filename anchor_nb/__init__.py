"Text embedders from language models: reconstruction first, contrast second."
__version__ = "0.1.0"

_HOMES = dict(AnchorEmbedder="models.embedder", Index="inference.search", Stage1="core.recipe", Stage2="core.recipe",
              train="training.trainer", launch="runs.launch", run_stage="experiments.stages", load_pairs="data.rows")
__all__ = list(_HOMES)


def __getattr__(name): # loaded when first asked for, since most of them bring torch
    if name not in _HOMES:
        raise AttributeError(f"module 'anchor_nb' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f"anchor_nb.{_HOMES[name]}"), name)


def __dir__(): return sorted([*globals(), *_HOMES])
