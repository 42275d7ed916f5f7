"""Partitions: every coordinate in exactly one group, the right one, and refusals that say what came."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from partita.structure import partitions
from partita.structure.partitions import Groups, Partition
from partita.target.space import ParameterSpace

FAST = settings(max_examples=60, deadline=None)
LAYERS = ("", "conv", "conv.inner", "a.0", "likelihood")
LEAVES = ("weight", "bias", "weight_ih_l0", "bias_hh_l1", "k_proj_weight", "parametrizations.weight.original0", "g")


@st.composite
def spaces(draw: st.DrawFn) -> ParameterSpace:
    """Any names, ranks 0 to 4, in any order: the likelihood's own need not be last."""
    names = draw(
        st.lists(st.sampled_from([f"{a}.{b}".strip(".") for a in LAYERS for b in LEAVES]), min_size=1, unique=True)
    )
    shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
    return ParameterSpace.of_tensors({n: torch.zeros(draw(shapes)) for n in names})


def of(module: nn.Module) -> ParameterSpace:
    return ParameterSpace.of_module(module)


def check(groups: Groups, dim: int) -> None:
    assert groups.labels.shape == (dim,)
    assert groups.labels.dtype == torch.long
    assert groups.labels.unique().tolist() == list(range(groups.count))  # each number from 0, no gaps
    assert sum(groups.sizes) == dim
    assert len(groups.sizes) == groups.count
    names = [groups.name(i) for i in range(groups.count)]
    assert len(set(names)) == groups.count
    assert all(names)


def members(partition: Partition, space: ParameterSpace) -> dict[str, list[str]]:
    """{name of a group: its coordinates, as "parameter[index in it]"}."""
    groups = partition.groups(space)
    flat = [f"{b.name}[{i}]" for b in space.blocks for i in range(b.size)]
    found: dict[str, list[str]] = {groups.name(i): [] for i in range(groups.count)}
    for coordinate, label in zip(flat, groups.labels.tolist()):
        found[groups.name(label)].append(coordinate)
    return found


def layout(partition: Partition, space: ParameterSpace) -> dict[str, Tensor]:
    """{parameter: its labels in its own shape}."""
    labels = partition.groups(space).labels
    return {b.name: labels[b.start : b.stop].view(b.shape) for b in space.blocks}


# -------------------------------------------------------------------------------------------------------- properties
@FAST
@given(spaces(), st.integers(1, 9), st.integers(0, 3))
def test_every_coordinate_has_one_label_and_no_number_is_left_out(space: ParameterSpace, M: int, seed: int) -> None:
    rest = sum(b.size for b in space.blocks if not b.name.startswith("likelihood."))
    own = sum(b.name.startswith("likelihood.") for b in space.blocks)
    for p in (partitions.joint(), partitions.by_layer(), partitions.by_neuron(), partitions.by_neuron("in")):
        check(p.groups(space), space.dim)
    check(partitions.each().groups(space), space.dim)
    check(
        partitions.by_name({space.names[0]: "first", "*": "rest"} if len(space.names) > 1 else {"*": 0}).groups(space),
        space.dim,
    )
    given_labels = (torch.arange(space.dim) % min(M, space.dim)).tolist()
    assert partitions.from_labels(given_labels).groups(space).labels.tolist() == given_labels
    for p in (partitions.random(M, seed), partitions.cyclic(M)):
        if rest < M:
            with pytest.raises(ValueError, match=f"M={M}.*1 to {rest}"):
                p.groups(space)
            continue
        groups = p.groups(space)
        check(groups, space.dim)
        assert groups.count == M + own
        dealt = groups.sizes[:M]
        assert max(dealt) - min(dealt) <= 1


@FAST
@given(spaces())
def test_a_likelihoods_own_parameters_are_groups_of_their_own(space: ParameterSpace) -> None:
    own = [b for b in space.blocks if b.name.startswith("likelihood.")]
    fits = sum(b.size for b in own) < space.dim
    dealt = [partitions.random(1), partitions.cyclic(1)] if fits else []
    for p in (partitions.by_layer(), partitions.by_neuron(), partitions.by_neuron("in"), *dealt):
        groups, labels = p.groups(space), layout(p, space)
        for b in own:
            (label,) = labels[b.name].unique().tolist()
            assert groups.sizes[label] == b.size
            assert groups.name(label) == b.name


def test_joint_by_name_and_from_labels_may_join_the_likelihoods_own() -> None:
    space = of(nn.Linear(2, 2)).extend({"likelihood.log_scale": torch.zeros(())})
    assert partitions.joint().groups(space).sizes == [7]
    assert partitions.by_name({"*": "all"}).groups(space).sizes == [7]
    assert partitions.from_labels([0] * 7).groups(space).sizes == [7]
    assert partitions.each().groups(space).sizes == [1] * 7
    assert partitions.by_layer().groups(space).sizes == [6, 1]
    assert partitions.cyclic(2).groups(space).labels.tolist() == [0, 1, 0, 1, 0, 1, 2]


def test_random_is_its_seed_and_leaves_torchs_random_state_alone() -> None:
    space = of(nn.Linear(30, 30))
    state = torch.get_rng_state()
    first, again, other = (partitions.random(7, seed=s).groups(space).labels for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.5
    assert (first != torch.arange(930) % 7).float().mean() > 0.5  # not cyclic
    assert torch.equal(state, torch.get_rng_state())


def test_cyclic_and_each() -> None:
    space = of(nn.Linear(3, 2))
    assert partitions.cyclic(3).groups(space).labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    each = partitions.each().groups(space)
    assert each.labels.tolist() == list(range(8))
    assert [each.name(i) for i in (0, 5, 6, 7)] == ["weight[0]", "weight[5]", "bias[0]", "bias[1]"]


# ------------------------------------------------------------------------------------------------------------ layers
def test_by_layer_groups_are_modules() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    found = {k: {c.split("[")[0] for c in v} for k, v in members(partitions.by_layer(), of(net)).items()}
    assert found == {
        "0": {"0.weight", "0.bias"},
        "2.0": {"2.0.weight", "2.0.bias"},
        "2.1": {"2.1.weight", "2.1.bias"},
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_by_layer_keeps_rnn_sublayers_and_directions_apart(kind: type) -> None:
    net = nn.ModuleDict({"rnn": kind(3, 2, num_layers=2, bidirectional=True)})
    found = members(partitions.by_layer(), of(net))
    assert list(found) == ["rnn.l0", "rnn.l0_reverse", "rnn.l1", "rnn.l1_reverse"]
    assert all(c.split("[")[0].endswith(k[4:]) for k, v in found.items() for c in v)


def test_by_layer_strips_the_path_of_parametrizations() -> None:
    net = nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    assert {k: len(v) for k, v in members(partitions.by_layer(), of(net)).items()} == {"0": 2 + 2 + 6, "1": 3}


def test_by_layer_of_attention_and_of_parameters_at_the_root() -> None:
    attention = nn.MultiheadAttention(4, 2)
    found = members(partitions.by_layer(), of(nn.ModuleDict({"attn": attention})))
    assert {k: len(v) for k, v in found.items()} == {"attn": 12 * 4 + 12, "attn.out_proj": 20}
    assert set(members(partitions.by_layer(), of(attention))) == {"model", "out_proj"}


def test_a_submodule_called_model_is_not_joined_with_the_root() -> None:
    net = nn.Module()
    net.scale, net.model = nn.Parameter(torch.ones(2)), nn.Linear(1, 1)
    assert partitions.by_layer().groups(of(net)).sizes == [2, 2]


# ----------------------------------------------------------------------------------------------------------- neurons
def test_by_neuron_of_linear_layers() -> None:
    space = of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    assert members(partitions.by_neuron(), space) == {
        "0[0]": ["0.weight[0]", "0.weight[1]", "0.weight[2]", "0.bias[0]"],
        "0[1]": ["0.weight[3]", "0.weight[4]", "0.weight[5]", "0.bias[1]"],
        "1[0]": ["1.weight[0]", "1.weight[1]", "1.bias[0]"],
    }
    assert members(partitions.by_neuron("in"), space) == {
        "0.weight[0]": ["0.weight[0]", "0.weight[3]"],
        "0.weight[1]": ["0.weight[1]", "0.weight[4]"],
        "0.weight[2]": ["0.weight[2]", "0.weight[5]"],
        "0.bias": ["0.bias[0]", "0.bias[1]"],
        "1.weight[0]": ["1.weight[0]"],
        "1.weight[1]": ["1.weight[1]"],
        "1.bias": ["1.bias[0]"],
    }


@pytest.mark.parametrize(
    "layer, out, side_in",
    [
        (nn.Conv2d(3, 4, 2), 0, 1),
        (nn.Conv1d(3, 4, 2), 0, 1),
        (nn.ConvTranspose2d(3, 4, 2), 1, 0),
        (nn.ConvTranspose1d(3, 4, 2), 1, 0),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_a_convolutions_neuron_is_its_channel(layer: nn.Module, out: int, side_in: int) -> None:
    labels = layout(partitions.by_neuron(), of(layer))
    weight = labels["weight"].movedim(out, 0).reshape(4, -1)
    assert (weight == weight[:, :1]).all()  # one label a channel
    assert weight[:, 0].unique().numel() == 4
    assert torch.equal(labels["bias"], weight[:, 0])  # and the bias joins it
    labels = layout(partitions.by_neuron("in"), of(layer))
    weight = labels["weight"].movedim(side_in, 0).reshape(3, -1)
    assert (weight == weight[:, :1]).all()
    assert weight[:, 0].unique().numel() == 3
    (bias,) = labels["bias"].unique().tolist()
    assert bias not in weight


def test_by_neuron_of_norms_scalars_and_embeddings() -> None:
    net = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "table": nn.Embedding(2, 4), "act": nn.PReLU()})
    net.register_parameter("gain", nn.Parameter(torch.ones(())))
    found = members(partitions.by_neuron(), of(net))
    assert found["norm[1]"] == ["norm.weight[1]", "norm.bias[1]"]
    assert found["table[1]"] == [f"table.weight[{i}]" for i in range(4, 8)]
    assert found["gain"] == ["gain[0]"]
    assert len(found) == 3 + 2 + 1 + 1
    assert len(members(partitions.by_neuron("in"), of(net))["norm.bias"]) == 6


def test_by_neuron_of_an_lstm() -> None:
    space = of(nn.ModuleDict({"rnn": nn.LSTM(3, 2, num_layers=2)}))
    labels = layout(partitions.by_neuron(), space)
    for layer in ("l0", "l1"):  # a gate's unit: its row of both matrices and both biases
        row = labels[f"rnn.weight_ih_{layer}"][:, 0]
        assert row.unique().numel() == 8
        for name in ("weight_ih", "weight_hh"):
            assert (labels[f"rnn.{name}_{layer}"] == row[:, None]).all()
        assert torch.equal(labels[f"rnn.bias_ih_{layer}"], row)
        assert torch.equal(labels[f"rnn.bias_hh_{layer}"], row)
    assert partitions.by_neuron().groups(space).count == 16
    labels = layout(partitions.by_neuron("in"), space)  # inputs x and states h are different neurons
    assert not set(labels["rnn.weight_ih_l0"].flatten().tolist()) & set(labels["rnn.weight_hh_l0"].flatten().tolist())
    assert partitions.by_neuron("in").groups(space).count == (3 + 2 + 1) + (2 + 2 + 1)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 5}], ids=["packed", "separate"])
def test_by_neuron_of_attention_joins_each_bias_to_its_own_projection(sizes: dict[str, int]) -> None:
    labels = layout(partitions.by_neuron(), of(nn.MultiheadAttention(4, 2, **sizes)))
    rows = [labels[n][:, 0] for n in ("q_proj_weight", "k_proj_weight", "v_proj_weight") if n in labels]
    rows = rows or [labels["in_proj_weight"][:, 0]]
    assert torch.equal(torch.cat(rows), labels["in_proj_bias"])
    assert labels["in_proj_bias"].unique().numel() == 12


# ---------------------------------------------------------------------------------------------------- by name, labels
def test_by_name_takes_the_first_pattern_that_matches() -> None:
    space = of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    groups = partitions.by_name({"1.*": "head", "*.bias": 7, "*.weight": "w"}).groups(space)
    assert [groups.name(i) for i in range(3)] == ["w", "7", "head"]
    assert groups.labels.tolist() == [0] * 4 + [1] * 2 + [2] * 3


def test_by_name_errors_print_both_sets() -> None:
    space = of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    for labels, words in (
        ({"0.*": 0}, ["parameters without a group ['1.weight', '1.bias']", "got patterns ['0.*']", "'0.weight'"]),
        (
            {"*": 0, "2.*": 1},
            ["decide nothing ['2.*']", "['*', '2.*']", "['0.weight', '0.bias', '1.weight', '1.bias']"],
        ),
        ({"*": 0, "1.*": 1}, ["decide nothing ['1.*']"]),  # never reached
    ):
        said = refusal(partitions.by_name(labels), space)
        assert all(w in said for w in words), said


def test_from_labels_refuses_what_does_not_fit() -> None:
    space = of(nn.Linear(2, 2))
    for labels, words in (
        ([0, 1], ["shape (2,)", "[D] = [6]"]),
        ([[0, 1, 0, 1, 0, 1]], ["shape (1, 6)", "[6]"]),
        ([0.0] * 6, ["torch.float32", "expected integers"]),
        ([True] * 6, ["torch.bool", "expected integers"]),
        ([1j] * 6, ["torch.complex64", "expected integers"]),
        ([0, 0, 1, 3, 3, 1], ["gaps: {0, 1, 3}", "expected {0, 1, 2}", "missing {2}", "unexpected {3}"]),
        ([1, 1, 1, 2, 2, 2], ["{1, 2}", "expected {0, 1}", "missing {0}"]),
        ([-1, 0, 1, 0, 1, 0], ["{-1, 0, 1}", "expected {0, 1, 2}"]),
        ([-1, 1, 1, -1, 1, 1], ["{-1, 1}", "missing {0}, unexpected {-1}"]),
    ):
        said = refusal(partitions.from_labels(labels), space)
        assert all(w in said for w in words), said
    long = of(nn.Linear(50, 1))
    said = refusal(partitions.from_labels([*range(30), *range(31, 52)]), long)  # the gap lies beyond what is printed
    assert "missing {30}, unexpected {51}" in said


def test_from_labels_holds_its_own_copy() -> None:
    mine = torch.tensor([0, 1, 0, 1, 0, 1])
    p = partitions.from_labels(mine)
    mine.fill_(5)
    groups = p.groups(of(nn.Linear(2, 2)))
    assert groups.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert partitions.from_labels(mine.new_zeros(6, dtype=torch.uint8)).groups(of(nn.Linear(2, 2))).count == 1


@pytest.mark.parametrize("make", [partitions.random, partitions.cyclic])
@pytest.mark.parametrize("M", [0, -1, 7, 2.0, "3"])
def test_a_number_of_groups_that_does_not_fit_is_refused(make, M) -> None:
    if M == 7:
        assert "M=7 groups does not fit: expected a whole number from 1 to 6" in refusal(make(M), of(nn.Linear(2, 2)))
    else:
        with pytest.raises(ValueError, match=rf"M={M!r}, expected a whole number of at least 1"):
            make(M)


def test_numpy_numbers_are_numbers() -> None:
    assert partitions.random(np.int64(3)).groups(of(nn.Linear(2, 2))).count == 3


def test_by_neuron_refuses_another_side() -> None:
    with pytest.raises(ValueError, match="side='both', expected 'out' or 'in'"):
        partitions.by_neuron("both")


def refusal(partition: Partition, space: ParameterSpace) -> str:
    with pytest.raises(ValueError) as e:
        partition.groups(space)
    assert "\n" not in str(e.value)
    return str(e.value)


# ---------------------------------------------------------------------------------------------------------- describe
def test_describe_a_short_list() -> None:
    text = partitions.by_layer().describe(of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 600))))
    assert text.splitlines() == [
        "by_layer(): 2 groups over 1,808 parameters (sizes 8 to 1,800)",
        "  0  0          8",
        "  1  1      1,800",
    ]
    assert (
        partitions.joint().describe(of(nn.Linear(1, 1))).startswith("joint(): 1 group over 2 parameters (sizes 2 to 2)")
    )


@pytest.mark.parametrize("D, most", [(12, 12), (13, 12), (100, 12), (100, 5), (9, 1)])
def test_describe_leaves_out_the_middle_of_a_long_list(D: int, most: int) -> None:
    groups = partitions.each().groups(of(nn.Linear(D, 1, bias=False)))
    head, *lines = groups.describe(most).splitlines()
    assert head == f"{D} groups over {D} parameters (sizes 1 to 1)"
    assert len(lines) <= max(most, 2)
    shown = [int(line.split()[0]) for line in lines if "…" not in line]
    assert shown == ([*range(D)] if most >= D else [*range(most - 2), D - 1])
    hidden = [int(line.split()[1]) for line in lines if "…" in line]
    assert hidden == ([D - len(shown)] if most < D else [])


def test_eleven_million_parameters_take_seconds() -> None:
    space = ParameterSpace.of_tensors({"a.weight": torch.zeros(3400, 3200), "b.weight": torch.zeros(300, 400)})
    for p in (partitions.by_neuron(), partitions.by_neuron("in"), partitions.each()):
        began = time.process_time()  # CPU time: the machine is shared
        groups = p.groups(space)
        groups.describe()
        assert time.process_time() - began < 3
    assert partitions.by_neuron().groups(space).count == 3400 + 300
    assert groups.count == space.dim == 11_000_000


def test_parametrised_and_grouped_layers_keep_their_neurons() -> None:
    """Weight norm does not hide a layer, and a grouped convolution's channels are counted through its groups."""
    assert partitions.by_layer().groups(of(weight_norm(nn.Linear(3, 2)))).count == 1
    assert partitions.by_neuron().groups(of(weight_norm(nn.ConvTranspose2d(2, 3, 2), dim=1))).sizes == [10] * 3
    assert partitions.by_neuron().groups(of(nn.ConvTranspose2d(4, 6, 2, groups=2))).sizes == [9] * 6
    assert partitions.by_neuron("in").groups(of(nn.Conv2d(4, 6, 2, groups=2))).sizes == [12] * 4 + [6]
