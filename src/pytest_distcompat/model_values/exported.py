"""Values that an export of a trained model should have, by the dtype that it is written in.

The check ``export`` loads what a trainer exported, without the trainer, and compares each tensor
with what this module returns. A trainer in bfloat16 with float32 masters (the copies that the
optimizer updates) may export either: the masters in float32, or the live parameters in bfloat16.
Values are compared by digests: hashes of whole tensors as text, in whatever dtype they are stored.
"""

from __future__ import annotations

from pytest_distcompat.cost import BYTES, nbytes
from pytest_distcompat.model_values.whole import Digests, values
from pytest_distcompat.trace import RunTrace, UnwrappedInfo

#: The names by which PEFT recognizes embeddings and output layers.
_EMBEDDING_LAYERS = frozenset({"embed_tokens", "lm_head"})
#: How the name of DoRA's magnitudes ends.
_MAGNITUDE = ".lora_magnitude_vector.weight"


def adapter_name(name: str) -> str:
    """Return the name under which PEFT saves an adapter's parameter: without the adapter's name.

    ``lora_A.default.weight`` becomes ``lora_A.weight``, and ``lora_embedding_A.default`` becomes
    ``lora_embedding_A``. DoRA's ``lora_magnitude_vector.default.weight`` is saved without its last
    part too. Other names stay as they are.
    """
    # Layers that are trained as a whole beside it (``modules_to_save``) are saved under the names
    # that they had before.
    name = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    if name.endswith(_MAGNITUDE):
        name = name.removesuffix(".weight")
    return name.removesuffix(".default")


def shared_name(name: str) -> str:
    """Return the name under which PEFT saves a buffer that the layers of an adapter share.

    ``base_model.model.layers.0.q_proj.vera_A.default`` becomes ``base_model.vera_A``, which PEFT
    saves once for all layers. Names of other buffers stay as they are.
    """
    path, _, last = name.rpartition(".")
    if last != "default":
        return name
    return f"base_model.{path.rpartition('.')[2]}"


def base_weight_of_embedding(name: str) -> bool:
    """Tell whether PEFT saves this weight beside an adapter, though it is frozen.

    Beside an adapter of an embedding or of the output layer PEFT saves the layer's own weight
    too (``save_embedding_layers="auto"`` of ``peft.get_peft_model_state_dict``). It recognizes
    these layers by their names (``peft.utils.constants.EMBEDDING_LAYER_NAMES``).

    Args:
        name: A name as in the unwrapped model: ``base_model.model.lm_head.base_layer.weight``.
    """
    layer, separator, _ = name.rpartition(".base_layer.")
    return bool(separator) and layer.rpartition(".")[2] in _EMBEDDING_LAYERS


def exported_weights(train: RunTrace, reload: RunTrace) -> Digests:
    """Return the digests that the export should hold, by unwrapped name.

    They are those of the master weights, or of the live parameters in a lower dtype where the
    export is in that dtype.

    Args:
        train: The run that trained and exported.
        reload: The run that loaded the export.
    """
    # Each tensor's own dtype decides: trained weights may be exported in float32 beside frozen ones
    # in bfloat16.
    exported = train.at("export")
    trained = values(train, exported)
    copies = trained.of("parameter")
    masters = trained.of("master")
    # Flat masters where there are some are what is optimized, else the live parameters.
    weights = {**copies, **masters}
    models = []
    for snapshot in exported:
        if snapshot.model:
            models.append(snapshot.model)
    if not masters or reload.unwrapped is None or not models:
        # There is nothing to choose, or the export could not be loaded.
        return weights
    live_size = max(nbytes(1, info.dtype) for info in models[0].parameters)
    if live_size >= BYTES["float32"]:
        return weights
    size_by_name = _exported_sizes(train, reload.unwrapped)
    for name in copies:
        if size_by_name.get(name, 4) <= live_size:
            weights[name] = copies[name]
    return weights


def _exported_sizes(train: RunTrace, reloaded: UnwrappedInfo) -> dict[str, int]:
    """Return in how many bytes an element of each parameter is exported."""
    # The dtype in the file, not the loaded one: PEFT widens what it loads.
    dtype_in_file: dict[str, str] = {}
    # Files are read first after a save and then after the export.
    for snapshot in train.at("files", 1):
        for file in snapshot.files:
            dtype_in_file.update(file.dtypes)
    sizes: dict[str, int] = {}
    for info in reloaded.parameters:
        dtype = (
            dtype_in_file.get(info.name) or dtype_in_file.get(adapter_name(info.name)) or info.dtype
        )
        sizes[info.name] = nbytes(1, dtype)
    return sizes
