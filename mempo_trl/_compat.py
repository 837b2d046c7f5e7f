"""The versions of TRL whose trainer is subclassed here."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


# `MemPOTrainer` overrides private methods of `GRPOTrainer`, which may change with every minor version. The same range
# stands in setup.cfg.
TRL_VERSIONS = ">=1.16,<1.17"


def check_trl_version() -> None:
    """Raise `ImportError` unless the installed TRL is one that `MemPOTrainer` was written against."""
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise ImportError(f"mempo_trl needs trl{TRL_VERSIONS}, but trl is not installed.") from None
    if not SpecifierSet(TRL_VERSIONS).contains(installed, prereleases=True):
        raise ImportError(
            f"mempo_trl needs trl{TRL_VERSIONS}, but trl {installed} is installed: "
            f"run `pip install 'trl{TRL_VERSIONS}'`."
        )
