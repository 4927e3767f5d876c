"""Flags that make a run of the tables take seconds: the mini pair, a few words, little of everything."""

import pathlib

FIXTURE = str(pathlib.Path(__file__).parent / "fixtures/mini_{}/legacy_f32/checkpoint_1500")
WORDS = ["fish three", "cat red", "blue", "one"]


def flags(directory: pathlib.Path) -> list[str]:
    """For configs/table2_demo.gin; results go to directory/results."""
    lines = directory / "lines.txt"
    lines.write_text("\n".join(WORDS))
    return [
        f"--gin.DIRECTORY='{directory}/results'",
        *"--gin.NAME='t' --gin.NUM_PROMPTS=1 --gin.REPEATS=1 --gin.ROUNDS=1 --gin.NUM_TOKENS=8".split(),
        "--gin.GAMMAS=(2,)",
        "--gin.MAX_GAMMA=2",
        "--gin.TEMPERATURES=(0.0,)",
        "--gin.TASKS=[@ende/Task()]",
        f"--gin.DRAFTS={{'small': '{FIXTURE.format('draft')}'}}",
        f"--gin.Task.target='{FIXTURE.format('target')}'",
        "--gin.Task.vocabulary='bytes'",
        f"--gin.ende/Task.inputs='{lines}'",
        "--gin.ende/Task.task_prefix=''",
        "--gin.Task.max_decode_length=12",
    ]
