"Text embedders from language models: reconstruction first, contrast second."
__version__ = "0.1.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING: # editors and type checkers read these; a test holds them equal to _HOMES
    from .core.recipe import Adapt, Stage1, Stage2
    from .data.rows import load_pairs
    from .experiments.stages import run_stage
    from .inference.search import Index
    from .models.embedder import AnchorEmbedder
    from .release.adapt import adapt
    from .runs.launch import launch
    from .training.trainer import train

__all__ = ["AnchorEmbedder", "Index", "train", "Stage1", "Stage2", "load_pairs", "launch", "run_stage", "Adapt",
           "adapt"]
_HOMES = dict(AnchorEmbedder="models.embedder", Index="inference.search", train="training.trainer",
              Stage1="core.recipe", Stage2="core.recipe", load_pairs="data.rows", launch="runs.launch",
              run_stage="experiments.stages", Adapt="core.recipe", adapt="release.adapt")


def __getattr__(name): # loaded when first asked for, since most of them bring torch
    if name not in _HOMES:
        raise AttributeError(f"module 'anchor_nb' has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f"anchor_nb.{_HOMES[name]}"), name)


def __dir__(): return sorted([*globals(), *_HOMES])
