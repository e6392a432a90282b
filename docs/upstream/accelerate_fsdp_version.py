"""accelerate 1.15.0: ``FullyShardedDataParallelPlugin`` accepts any ``fsdp_version``, and prepares half FSDP1, half FSDP2.

Any version but 2 is wrapped by FSDP1, while what is said of a version that is 1 is not done: ``reshard_after_forward=True`` of a
mistyped FSDP2 ends in torch's ``KeyError: True``. Expected: a ValueError that names the version. Seen: the plugin is made.
"""

from accelerate import FullyShardedDataParallelPlugin

try:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=7)
except ValueError as error:
    print(f"GONE {error}")
else:
    print(
        f"SEEN fsdp_version={plugin.fsdp_version} is accepted, reshard_after_forward={plugin.reshard_after_forward}"
    )
