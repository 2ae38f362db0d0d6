"""A mode per layer: mappings, callables and `by_depth`."""

import pytest
import torch
from torch import nn

import normplug
from fuse_cases import PreNorm
from normplug import by_depth, check, plan, set_mode, swap
from swap_cases import GOLDEN, Net, X, assert_frozen, frozen


def targets(model):
    layers = model.named_modules()
    return {p: m.target_variance for p, m in layers if hasattr(m, "target_variance")}


def transformer(blocks=3):
    model = nn.Sequential(nn.Linear(4, 4), *(PreNorm(4) for _ in range(blocks)))
    return nn.Sequential(
        nn.Identity(),
        nn.ModuleDict({"layers": model}),
        nn.ModuleDict({"norm": nn.LayerNorm(4)}),
    )


def stages(*depths):
    """Numbered stages as in a ResNet: sequences of blocks, the first of which has one more norm."""

    def block(first):
        parts = {"norm1": nn.BatchNorm2d(2), "norm2": nn.BatchNorm2d(2)}
        shortcut = {"downsample": nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))}
        return nn.ModuleDict(parts | shortcut if first else parts)

    made = {
        f"layer{n}": [block(i == 0) for i in range(d)] for n, d in enumerate(depths, 1)
    }
    return nn.ModuleDict(
        {
            "bn1": nn.BatchNorm2d(2),
            **{n: nn.Sequential(*blocks) for n, blocks in made.items()},
        }
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ({"stem.*": 0.5, "*": "golden"}, (0.5, GOLDEN, GOLDEN)),
        ({"*": 2, "stem.*": 0.5}, (2, 2, 2)),  # the first that matches
        (
            {"head.1": 0.5, nn.BatchNorm1d: 3, "re:.*": 1},
            (1, 3, 0.5),
        ),  # any name of a shared layer
        ({("stem.*", "norm"): 0.25, lambda path, m: path == "flat": 4}, (0.25, 4, 0.25)),
        (lambda path, m: 0.5 if isinstance(m, nn.LayerNorm) else len(path), (6, 4, 0.5)),
    ],
)
def test_each_layer_gets_its_own_mode(net, mode, expected):
    expected = dict(zip(("stem.1", "flat", "norm"), map(float, expected), strict=True))
    assert {row.path: row.mode.target_variance for row in plan(net, mode)} == expected
    assert targets(swap(net, mode)) == expected
    assert len(check(net, X)) == 3
    assert targets(set_mode(net, 1)) == dict.fromkeys(expected, 1.0)
    assert targets(set_mode(net, mode)) == expected


def test_a_layer_without_a_mode_is_refused_and_nothing_changes(net):
    refused = {
        "no key of mode matches flat, norm. Add a key such as": {"stem.*": 1},
        r"mode key='layer9.\*' matches no norm layer; the model has": {
            "layer9.*": 1,
            "*": 2,
        },
        "mode key='re:.' is not a valid regular expression": {"re:(": 1},
        r"got 'gold'\. That is the mode of 'stem": {"stem.*": "gold", "*": 1},
        r"got None\. That is the mode of flat": lambda path, m: (
            1 if path == "stem.1" else None
        ),
        "For a mode per layer, give a mapping": "1/l",
        "Net has no sequence of blocks": by_depth("1/l"),
    }
    before = frozen(net)
    for text, mode in refused.items():
        for call in (plan, swap):
            with pytest.raises(ValueError, match=text):
                call(net, mode)
        assert_frozen(net, before)
    with pytest.raises(TypeError, match="mode key must be a glob"):
        swap(net, {3: 1})
    swap(net, {"stem.*": 1}, include="stem.*")  # only layers that swap takes need a mode
    swap(net, 0.5)
    with pytest.raises(ValueError, match=r"normplug\.set_mode: no key of mode matches"):
        set_mode(net, {"stem.*": 1})
    assert set(targets(net).values()) == {0.5}


def test_the_modes_of_a_checkpoint_can_be_restored_from_its_metadata(net):
    saved = swap(net, {"stem.*": 0.5, "*": "golden"}).state_dict()
    twin = swap(Net(), 2)
    with pytest.warns(UserWarning, match="a mapping from paths to modes"):
        twin.load_state_dict(saved)
    key = "target_variance"
    set_mode(twin, {path: m[key] for path, m in saved._metadata.items() if key in m})
    assert targets(twin) == targets(net)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1/l", (1, 1 / 2, 1 / 3)),
        ("reversed", (1 / 3, 1 / 2, 1)),
        (lambda block, blocks: block + 10 * blocks, (31, 32, 33)),
    ],
)
def test_by_depth_counts_blocks_and_leaves_the_final_norm_at_standard(schedule, expected):
    model = transformer()
    rows = plan(model, by_depth(schedule))
    lines = [line.split() for line in str(rows).splitlines()]
    assert lines[0] == ["path", "class", "becomes", "block", "mode", "notes"]
    assert lines[7] == ["2.norm", "LayerNorm", "normplug.LayerNorm", "-", "standard"]
    assert [row.block for row in rows] == [1, 1, 2, 2, 3, 3, None]
    swap(model, by_depth(schedule))
    numbers = [tv for tv in expected for _ in range(2)]
    assert list(targets(model).values()) == [*map(float, numbers), 1.0]
    x = torch.randn(5, 4)
    norm = model[1]["layers"][2].norm1
    expected = torch.nn.functional.layer_norm(x, (4,)) * norm.target_variance**0.5
    torch.testing.assert_close(norm(x), expected)


def test_blocks_are_counted_across_stages_in_the_order_of_their_numbers():
    model = nn.ModuleDict(dict(sorted(stages(2, 1, 2).items(), reverse=True)))
    rows = {row.path: row.block for row in plan(model, by_depth("1/l"))}
    assert rows["bn1"] is None
    assert rows["layer1.0.downsample.1"] == rows["layer1.0.norm1"] == 1
    assert (rows["layer1.1.norm2"], rows["layer2.0.norm1"], rows["layer3.1.norm1"]) == (
        2,
        3,
        5,
    )


def stage():
    """As a ConvNeXt's with one block, which has a norm of its own beside the block."""
    down = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(2, 2, 1))
    return nn.ModuleDict({"down": down, "layers": nn.ModuleList([PreNorm(4)])})


def unit():
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (
            lambda: nn.Sequential(unit(), unit()),
            [1, 2],
        ),  # units count if there is no other block
        (lambda: nn.Sequential(unit(), PreNorm(4), PreNorm(4)), [None, 1, 1, 2, 2]),
        (
            lambda: nn.Sequential(*(nn.ModuleList([unit(), unit()]) for _ in "ab")),
            [1, 1, 2, 2],
        ),
        (lambda: nn.ModuleDict({"b10": PreNorm(4), "b9": PreNorm(4)}), [2, 2, 1, 1]),
        (lambda: nn.ModuleList([stage(), stage()]), [None, 1, 1, None, 2, 2]),
        (
            lambda: nn.ModuleList(
                nn.ModuleList([nn.TransformerEncoderLayer(4, 2), PreNorm(4)])
                for _ in "ab"
            ),
            [1] * 4 + [2] * 4,  # unlike each other: the parts of one block
        ),
    ],
)
def test_blocks_are_recognised(make, blocks):
    model = make()
    assert [row.block for row in plan(model, by_depth("1/l"))] == blocks


def encoder_and_decoder():
    return nn.Transformer(4, 2, 2, 2, 4, batch_first=True)


def experts():
    layer = PreNorm(4)
    layer.experts = nn.ModuleList(PreNorm(4) for _ in range(4))
    return nn.ModuleDict({"layers": nn.ModuleList([layer])})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (encoder_and_decoder, "encoder.layers.0 to encoder.layers.1 and decoder"),
        (lambda: nn.ModuleList([PreNorm(4)] * 2), "0.norm1 is in block 1 and in block 2"),
        (
            experts,
            "layers.0 may be one block, or a stage of several: layers.0.experts.0 to",
        ),
        (
            lambda: nn.Sequential(nn.Sequential(PreNorm(4)), PreNorm(4)),
            "0 may be one block, or a stage",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
            "Sequential has no sequence of",
        ),
    ],
)
def test_by_depth_refuses_a_model_whose_depth_is_ambiguous(make, text):
    model = make()
    with pytest.raises(ValueError, match=f"{text}.*Give a mapping of filters to modes"):
        swap(model, by_depth("1/l"))
    assert not targets(model)


def test_a_filter_makes_the_depth_of_one_part_unambiguous():
    model = encoder_and_decoder()
    swap(model, by_depth("1/l"), include="encoder.*")
    assert [tv for p, tv in targets(model).items() if "layers" in p] == [1, 1, 0.5, 0.5]
    set_mode(model, by_depth("reversed"))
    assert model.encoder.layers[0].norm1.target_variance == 0.5


def test_by_depth_rejects_a_schedule_that_gives_no_mode():
    for error, schedule in ((ValueError, "1/x"), (TypeError, 3), (TypeError, float)):
        with pytest.raises(
            error, match=r"by_depth: schedule must be '1/l', 'reversed', or a call"
        ):
            by_depth(schedule)
    with pytest.raises(
        ValueError, match=r"got 0\. That is the mode of block 1 of 2, 1\.layers\.1"
    ):
        swap(transformer(2), by_depth(lambda block, blocks: block - 1))
    assert str(by_depth("1/l")) == "by_depth('1/l')"
    assert (
        normplug.check(swap(transformer(5), by_depth("1/l")))
        .summary()
        .endswith("in 5 modes from 0.2 to standard")
    )
