"""Train a model: `python launch.py zero.stage=3 launch.nproc_per_node=2`, or the same under torchrun; `-m` sweeps."""

from pathlib import Path

from zerotrain.launching.imports import importing

with importing():
    import hydra
    from omegaconf import DictConfig

    from zerotrain.config.compose import register_schema
    from zerotrain.launching.command import dispatch

register_schema()


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(composed: DictConfig) -> float | None:
    """One job: returns the final validation loss, the objective of a sweeper."""
    with importing():  # imports torch, which tab completion has no need of
        from zerotrain.launching.task import run_job

    return run_job(composed)


if __name__ == "__main__":
    dispatch(main, conf=Path(__file__).resolve().parent / "conf")
