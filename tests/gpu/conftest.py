"""What only a GPU can show. Skipped, with the reason, where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    wanted = "cuda" in config.getoption("--devices")
    gpus = torch.cuda.device_count() if wanted else 0
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    for item in here:
        if not gpus:
            reason = "no CUDA device" if wanted else "CUDA is not among --devices"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))
        elif item.get_closest_marker("large") and memory < 80 << 30:
            item.add_marker(pytest.mark.skip(reason="needs a GPU with 80 GB"))


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
