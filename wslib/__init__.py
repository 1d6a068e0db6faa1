"""Word sensitivity of random features and attention layers.

One way through: text → context → feature map → edit of one word → sensitivity → learning → figure.
"""

from wslib.features import Attention, DeepRandomFeatures, PretrainedAttention, RandomAttention, RandomFeatures
from wslib.learning import LearnedEdit, Model, find_edit, frontier, interpolate, measure_edit
from wslib.sensitivity import Sensitivity, word_sensitivity
from wslib.sweeps import sweep
from wslib.text import Contexts, embed_text, embed_vocabulary, load_contexts, load_embeddings, load_model

__all__ = [
    "Attention",
    "Contexts",
    "DeepRandomFeatures",
    "LearnedEdit",
    "Model",
    "PretrainedAttention",
    "RandomAttention",
    "RandomFeatures",
    "Sensitivity",
    "embed_text",
    "embed_vocabulary",
    "find_edit",
    "frontier",
    "interpolate",
    "load_contexts",
    "load_embeddings",
    "load_model",
    "measure_edit",
    "sweep",
    "word_sensitivity",
]
