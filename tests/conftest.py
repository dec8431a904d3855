"""Devices, dtypes, seeds and example counts for the whole suite."""

import os

# cuBLAS reads this when CUDA starts; without it torch warns in its deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import hypothesis
import pytest
import torch
from cases import DTYPE_NAMES, DTYPES

hypothesis.settings.register_profile(
    "suite",
    deadline=None,  # the first example pays for warming up
    derandomize=True,  # the same examples in every run
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line("markers", "cpu: says nothing about a GPU")
    config.addinivalue_line("markers", "large: needs many GB of GPU memory")
    config.addinivalue_line("markers", "multi_gpu: needs two GPUs")


def pytest_addoption(parser):
    default = "cpu,cuda" if torch.cuda.is_available() else "cpu"
    parser.addoption("--devices", default=default, help="devices that the tests run on")


def pytest_generate_tests(metafunc):
    """`device` runs on every device asked for; with `dtype` beside it, in each dtype it has."""
    names = metafunc.fixturenames
    if "device" not in names:
        return
    devices = metafunc.config.getoption("--devices").split(",")
    if "dtype" not in names:
        metafunc.parametrize("device", devices)
        return
    pairs = [(device, dtype) for device in devices for dtype in DTYPES[device]]
    ids = [f"{device}-{DTYPE_NAMES[dtype]}" for device, dtype in pairs]
    metafunc.parametrize(("device", "dtype"), pairs, ids=ids)


def pytest_collection_modifyitems(config, items):
    if "cpu" not in config.getoption("--devices"):
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason="cpu is not among --devices"))


def pytest_report_header(config):
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"torch {torch.__version__}, devices {config.getoption('--devices')}, CUDA card: {cuda}"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
