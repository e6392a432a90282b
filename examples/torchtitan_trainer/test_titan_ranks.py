"""An ordinary test, on every rank: torchtitan's mesh of the axes that its configuration names."""

import pytest


@pytest.mark.distcompat(world_size=4)
def test_neighbours_share_a_layer(rank: int) -> None:
    from small_titan import small_config
    from torchtitan.distributed import ParallelDims

    config = small_config()
    config.parallelism.tensor_parallel_degree = 2
    dims = ParallelDims.from_config(config.parallelism, 4)
    dims.build_mesh()
    assert dims.get_mesh("tp").mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
