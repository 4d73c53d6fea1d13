"""The configs that come with the package: where they are, and what they are for. It loads nothing big."""

from pathlib import Path


def shipped_config_dir() -> Path:
    """``conf/``: inside the package where it is installed from a wheel, at the root of a source checkout."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def shipped_configs() -> list[str]:
    """What ``--config-name`` takes without ``--config-path``; the experiments last."""
    folder = shipped_config_dir()
    files = [*sorted(folder.glob("*.yaml")), *sorted((folder / "experiment").rglob("*.yaml"))]
    return [str(file.relative_to(folder).with_suffix("")) for file in files]
