"""Fused Triton kernels, an operator per file, each with a plain torch reference.

Importing the package imports all its modules, and so registers every operator under
``torch.ops.megacompile``. It launches nothing, and works where triton is not installed. On CUDA tensors
an operator runs its Triton kernel, on CPU tensors its reference (or, with ``TRITON_INTERPRET=1``, the kernel
in triton's interpreter).
"""

import importlib
import pkgutil

from megacompile.kernels.adamw import adamw_
from megacompile.kernels.add_rms_norm import add_rms_norm
from megacompile.kernels.attention import document_bounds, flash_attention_backward, flash_attention_forward
from megacompile.kernels.clamped_glu import clamped_glu
from megacompile.kernels.decode_4bit import decode_weight
from megacompile.kernels.decode_8bit import decode_rows
from megacompile.kernels.dropout import dropout_mask
from megacompile.kernels.gated_delta import gated_delta_rule
from megacompile.kernels.glu import glu
from megacompile.kernels.layer_norm import layer_norm
from megacompile.kernels.linear_cross_entropy import linear_cross_entropy
from megacompile.kernels.mamba2 import mamba2_chunk_scan
from megacompile.kernels.qk_norm_rope import qk_norm_rope
from megacompile.kernels.rms_norm import rms_norm
from megacompile.kernels.rope import rope

# By the package's own name: transformers looks for a library of the name ``kernels``, and in a checkout
# finds this folder.
for _module in pkgutil.iter_modules(__path__, "megacompile.kernels."):
    importlib.import_module(_module.name)

__all__ = [
    "adamw_",
    "add_rms_norm",
    "clamped_glu",
    "decode_rows",
    "decode_weight",
    "document_bounds",
    "dropout_mask",
    "flash_attention_backward",
    "flash_attention_forward",
    "gated_delta_rule",
    "glu",
    "layer_norm",
    "linear_cross_entropy",
    "mamba2_chunk_scan",
    "qk_norm_rope",
    "rms_norm",
    "rope",
]
