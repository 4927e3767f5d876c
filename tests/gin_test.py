import pathlib
import re
import tomllib

import gin
import pytest

from specdec_jax import configuration, packaged
from specdec_jax.models.t5 import T5, T5Config

ROOT = pathlib.Path(__file__).parent.parent
SIZES = [
    f"{family}_{size}"
    for family, sizes in {
        "t5_1_1": "small base large xl xxl",
        "t5_1_0": "small base large 3b 11b",
        "mt5": "small base large xl xxl",
        "byt5": "small base large xl xxl",
    }.items()
    for size in sizes.split()
]
TABLES = ["table2_demo.gin", "table2_simulated.gin", "table2_tpu.gin"]
CONFIGS = [
    "tpu.gin",
    "demo.gin",
    "drafters_demo.gin",
    "demo_ende.gin",
    "demo_restore.gin",
    "demo_summarize.gin",
    "generate.gin",
    *TABLES,
]
COMMANDS = {"demo.gin": configuration.demo, "tpu.gin": configuration.tpu, "drafters_demo.gin": configuration.drafters}
COMMANDS |= dict.fromkeys(TABLES, configuration.plan)
REQUIRED = ["TARGET_CHECKPOINT='t'", "DRAFT_CHECKPOINT='d'", "VOCABULARY='bytes'"]


@pytest.fixture(autouse=True)
def clean():
    gin.clear_config()
    yield
    gin.clear_config()


def configure(*files, bindings=(), search_paths="", configurable=configuration.generate):
    return configuration.configure(configurable, files, bindings, search_paths)


def num_weights(c: T5Config) -> int:
    """Millions of weights by formula."""
    projection = c.emb_dim * c.num_heads * c.head_dim
    mlp = (len(c.mlp_activations) + 1) * c.emb_dim * c.mlp_dim
    encoder = c.num_encoder_layers * (4 * projection + mlp + 2 * c.emb_dim)
    decoder = c.num_decoder_layers * (8 * projection + mlp + 3 * c.emb_dim)
    tables = (1 if c.logits_via_embedding else 2) * c.vocab_size * c.emb_dim
    return tables + encoder + decoder + 2 * c.emb_dim + 2 * c.relpos_num_buckets * c.num_heads


# As published, in millions.
PUBLISHED = {
    "t5_1_1": [77, 248, 783, 2850, 11135],
    "t5_1_0": [60.5, 223, 738, 2852, 11307],
    "mt5": [300, 582, 1230, 3740, 12900],
    "byt5": [300, 582, 1230, 3740, 12900],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_published_number_of_weights(name):
    binding = f"TARGET_CONFIG=@{name}/T5Config()"
    models, _ = configure("gin/generate.gin", f"gin/{name}.gin", bindings=[*REQUIRED, binding])
    config = models.target_config
    assert type(config) is T5Config and models.draft_config is None
    family, size = name.rsplit("_", 1)
    place = [n.rsplit("_", 1)[1] for n in SIZES if n.startswith(family)].index(size)
    assert num_weights(config) / 1e6 == pytest.approx(PUBLISHED[family][place], rel=0.01)
    assert config.logits_via_embedding == (family == "t5_1_0")
    assert (config.num_encoder_layers == 3 * config.num_decoder_layers) == (family == "byt5")


def test_the_formula_counts_what_the_model_has():
    import jax

    models, _ = configure(
        "gin/generate.gin", "gin/t5_1_0_small.gin", bindings=[*REQUIRED, "TARGET_CONFIG=@t5_1_0_small/T5Config()"]
    )
    shapes = T5(models.target_config).param_shapes()
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == num_weights(models.target_config) == 60_506_624


def test_two_sizes_in_one_run():
    bindings = ["TARGET_CONFIG=@t5_1_1_xxl/T5Config()", "DRAFT_CONFIG=@t5_1_1_small/T5Config()"]
    models, _ = configure(
        "gin/generate.gin", "gin/t5_1_1_xxl.gin", "gin/t5_1_1_small.gin", bindings=[*REQUIRED, *bindings]
    )
    assert (models.target_config.emb_dim, models.draft_config.emb_dim) == (4096, 512)
    assert (models.target_config.num_heads, models.draft_config.num_heads) == (64, 6)


@pytest.mark.parametrize("name", CONFIGS)
def test_runs_parse_and_their_headers_are_true(name):
    text = (ROOT / "configs" / name).read_text()
    header = text.split("\n\n")[0]
    command = COMMANDS.get(name, configuration.generate)
    required = re.search(r"# Required macros: (.*)\.", header)[1]
    required = [] if required == "none" else required.split(", ")
    for part in ("# RUN: ", "#   specdec ", "# Hardware: ", "# Prints: "):
        assert part in header
    assert name in ("demo.gin", "tpu.gin") or f"--gin_file=configs/{name}" in header
    if required:
        with pytest.raises(ValueError, match=f"the macro {required[0]} is required"):
            configure(f"configs/{name}", configurable=command)
    values = dict(binding.split("=") for binding in REQUIRED)
    for task in ("ENDE", "CNNDM"):
        values |= {f"{task}_TARGET": "'t'", f"{task}_DRAFTS": "{'small': 'd'}", f"{task}_INPUTS": "'lines.txt'"}
    result = configure(
        f"configs/{name}", bindings=[f"{macro}={values[macro]}" for macro in required], configurable=command
    )
    settings = {k: v for part in (result if isinstance(result, tuple) else [result]) for k, v in vars(part).items()}
    overridden = re.search(r"# Commonly overridden: (.*?)\n# [A-Z]", header, re.DOTALL)[1]
    for macro, default in re.findall(r"\b([A-Z][A-Z_]+)(?: \(([^,)]*))?", overridden):
        if macro.lower() in settings and default:
            assert settings[macro.lower()] == gin.config.parse_value(default), macro
    for macro in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", overridden):
        assert macro.lower() in settings, macro


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("ende", "translate English to German: "), ("summarize", "summarize: "), ("restore", "restore: ")],
)
def test_demo_runs_name_the_packaged_pair(name, prefix):
    models, settings = configure(f"configs/demo_{name}.gin")
    assert (models.target_checkpoint, models.draft_checkpoint) == ("demo:target", "demo:draft_small")
    assert models.vocabulary == "demo:vocabulary" and models.dtype is None
    assert (settings.gamma, settings.temperature, settings.max_decode_length) == (3, 0.0, 64)
    assert (settings.task_prefix, settings.max_input_length, settings.batch_size) == (prefix, 128, 1)


def test_flags_override_files_and_later_flags_earlier_ones():
    _, settings = configure("configs/demo_ende.gin", bindings=["GAMMA=5", "GAMMA=6", "generate.top_k=3", "TOP_P=0.5"])
    assert (settings.gamma, settings.top_k, settings.top_p) == (6, 3, 0.5)


def test_ids_may_be_a_list():
    assert configure("configs/demo_ende.gin", bindings=["FORBIDDEN_IDS=[3, 4]"])[1].forbidden_ids == (3, 4)


def test_macros_of_a_users_own(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("include 'configs/demo_ende.gin'\nLONG = 7\nGAMMA = %LONG\nTASK_PREFIX = 'not a %MACRO: '\n")
    _, settings = configure(str(file))
    assert (settings.gamma, settings.task_prefix) == (7, "not a %MACRO: ")
    file.write_text("include 'configs/demo_ende.gin'\nLONG = 7\n")
    with pytest.raises(ValueError, match="^nothing uses the macro LONG"):
        configure(str(file))


def test_a_run_starts_from_a_clean_slate():
    configure("configs/demo_ende.gin", bindings=["GAMMA=9"])
    assert configure("configs/demo_ende.gin")[1].gamma == 3


def test_places_where_files_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gin.config, "_LOCATION_PREFIXES", [""])
    monkeypatch.chdir(tmp_path)

    def write(place, gamma):
        (tmp_path / place / "configs").mkdir(parents=True, exist_ok=True)
        path = tmp_path / place / "configs" / "generate.gin"
        path.write_text(f"include 'gin/generate.gin'\nGAMMA = {gamma}\n")

    def gamma():
        monkeypatch.setattr(gin.config, "_LOCATION_PREFIXES", [""])
        return configure("configs/generate.gin", bindings=REQUIRED, search_paths="a,b")[1].gamma

    assert gamma() == 4  # the package's
    write("b", 12)
    assert gamma() == 12
    write("a", 11)
    assert gamma() == 11
    write(".", 10)
    assert gamma() == 10


def test_every_package_and_gin_file_is_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for path in (ROOT / "specdec_jax").rglob("__init__.py")
    }
    assert set(project["packages"]) == found | {"specdec_jax.gin", "specdec_jax.configs"}
    for folder in ("gin", "configs"):
        files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {path.suffix for path in files} == {".gin"}  # an __init__.py would make the folder hide the package gin
        patterns = project["package-data"][f"specdec_jax.{folder}"]
        assert files == {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    assert [root for root in packaged.GIN_ROOTS if (root / "configs" / "generate.gin").exists()] == [ROOT]


def test_what_comes_after_may_have_configurables_of_its_own():
    configuration.configure(configuration.demo, ["configs/demo.gin"], [])

    @gin.configurable("registered_later")  # as t5x does where `specdec peers` imports it
    def later():
        pass
