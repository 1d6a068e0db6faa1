"""Word sensitivity of random features and attention layers.

One way through: text → context → feature map → edit of one word → sensitivity → learning → figure.
"""

from wslib.features import Attention, DeepRandomFeatures, PretrainedAttention, RandomAttention, RandomFeatures
from wslib.sensitivity import Sensitivity, word_sensitivity

__all__ = [
    "Attention",
    "DeepRandomFeatures",
    "PretrainedAttention",
    "RandomAttention",
    "RandomFeatures",
    "Sensitivity",
    "word_sensitivity",
]
