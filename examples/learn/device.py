"""Where the programs of this folder run: on a GPU where there is one, else in Triton's interpreter.

Import it before triton, which reads TRITON_INTERPRET when it is imported and when a kernel is
defined. TRITON_INTERPRET=1 chooses the interpreter on a machine with a GPU too.
"""

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    def _patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor) -> None:
        """Triton 3.6 makes a loop's bound of an array of one element by int(), which numpy 2.4 and
        newer refuse."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor


def check(*tensors: torch.Tensor) -> None:
    """Refuses bf16 in the interpreter, which would compute with its bits as integers."""
    if DEVICE == "cpu" and any(x.dtype == torch.bfloat16 for x in tensors):
        raise TypeError("Triton's interpreter takes bf16's bits for integers: use fp16 or fp32")
