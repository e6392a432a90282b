"""Print the name of every call that the probe has wrapped, a line each, once all libraries that it knows are imported."""

import gc
import importlib
import types

from pytest_distcompat.ext.scripts import wrappers

#: What imports each module that the probe waits for.
for name in (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "accelerate",
    "deepspeed",
    "safetensors.torch",
    "transformers.trainer",
    "transformers.modeling_utils",
    "pytorch_lightning",
):
    importlib.import_module(name)
for function in gc.get_objects():
    code = function.__code__ if isinstance(function, types.FunctionType) else None
    if code is not None and (code.co_filename, code.co_name) == (wrappers.__file__, "wrapped"):
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        print("wrapped:", cells["qualified_name"].cell_contents)
