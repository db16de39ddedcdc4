import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

import tests.shapes  # noqa: E402, F401 --jaxtyping-packages needs it before anything imports spec_jax
from spec_jax.engine import programs  # noqa: E402

CACHE = Path(__file__).parents[1] / ".cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

# No deadline: the first example of a test compiles. In CI the examples are the same every time.
hypothesis.configuration.set_hypothesis_home_dir(CACHE / "hypothesis")
hypothesis.settings.register_profile("spec_jax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("spec_jax")


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collection: tracing makes so many objects that it runs all the time."""
    gc.collect()
    gc.freeze()


MAPS, MOST_MAPS = Path("/proc/self/maps"), 20_000


@pytest.fixture(autouse=True, scope="module")
def release_programs():
    """Let compiled programs go when they fill the process's memory map: Linux allows 65,530 parts, then XLA aborts."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        programs.forget()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def own_programs(request):
    """A test that patches our code neither meets programs that were compiled without, nor leaves any."""
    patching = "monkeypatch" in request.fixturenames
    if patching:
        programs.forget()
    yield
    if patching:
        programs.forget()
