"""Files of other programs: what they become, what is assumed, and that nothing is lost unsaid."""

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.collectives.pricing import Group, collective_time_s, fabric_from_topology
from fivefold.collectives.pricing.software import software_of
from fivefold.errors import ConfigurationError, FivefoldError
from fivefold.network.topology import named_topology, parse_topology
from fivefold.network.topology.text import topology_with_reading
from helpers.night import number_of

NCCL = """<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="1" gdr="1">
          <nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/>
          <nvlink target="0000:c5:00.0" count="6" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:12:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" speed="200000" port="1" latency="1.5" guid="0x1" gdr="1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:20:00.0" class="0x030200" link_speed="8.0 GT/s PCIe" link_width="8">
      <gpu dev="1" sm="80" rank="0" gdr="1">
        <nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/>
        <nvlink target="0000:c5:00.0" count="6" tclass="0x068000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""
SMI = """\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tNV4\tNV4\tPXB\tSYS\t0-31\t0\t\tN/A
GPU1\tNV4\t X \tNV4\tNV4\tPXB\tSYS\t0-31\t0\t\tN/A
GPU2\tNV4\tNV4\t X \tNV4\tSYS\tPXB\t32-63\t1\t\tN/A
GPU3\tNV4\tNV4\tNV4\t X \tSYS\tPXB\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = bonded NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
IBSTAT = """CA 'mlx5_0'
\tCA type: MT4123
\tPort 1:
\t\tState: Active
\t\tRate: 200
CA 'mlx5_1'
\tPort 1:
\t\tState: Down
\t\tRate: 10
"""
PCIE_ONLY = """<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD">
  <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
    <pci busid="0001:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
    <pci busid="0101:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
    <pci busid="0002:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
  </pci></cpu></system>"""


def read(tmp_path, text, told="", name="given.any"):
    path = tmp_path / name
    path.write_text(text)
    return topology_with_reading(f"{path}{told}")


def rate(topology, source, target):
    found = [
        link.capacity_bytes_per_s
        for link in topology.links
        if (link.source, link.target) == (source, target)
    ]
    return sum(found)


def assumed(reading):
    return {note.name: note.value for note in reading.assumed}


def test_a_dump_of_nccl_becomes_its_links(tmp_path):
    found, reading = read(tmp_path, NCCL)
    assert found.ranks == ("gpu0", "gpu1")
    # Data sheet of the A100: 600 GB/s of NVLink both ways; PCIe 4.0 x16 has 31.5 GB/s, 3.0 x8 7.9.
    assert rate(found, "gpu0", "nvswitch") == rate(found, "nvswitch", "gpu1") == 300e9
    assert rate(found, "gpu1", "pci 0000:10:00.0") == pytest.approx(31.5e9, rel=1e-3)
    assert rate(found, "gpu0", "numa1") == pytest.approx(7.88e9, rel=1e-3)  # rank 0 is dev 1
    assert rate(found, "numa0", "numa1") == 16e9  # AMD_BW of NCCL's topo.h
    assert assumed(reading) == {"link between sockets (AMD)": "128 Gbit/s"}
    assert "NVLink of sm 80" in {note.name for note in reading.read}
    left = {note.name for note in reading.left_out}
    assert left == {"gpu@gdr", "net@gdr"}


def test_boxes_are_joined_by_the_adapters_of_the_dump(tmp_path):
    found, _ = read(tmp_path, NCCL, ":2")
    assert (found.num_ranks, len(found.hosts)) == (4, 2)
    assert rate(found, "box1/mlx5_0", "fabric") == 25e9
    there = [link.latency_s for link in found.links if "fabric" in (link.source, link.target)]
    assert sum(there[:2]) == pytest.approx(1.5e-6)
    rails, _ = read(tmp_path, NCCL, ":2,network=rails,nic=50 GB/s")
    assert rate(rails, "box0/mlx5_0", "rail0") == 50e9


def test_a_dump_agrees_with_the_machine_that_is_built_in(tmp_path):
    """Eight A100 as the DGX has them, by NCCL's dump: the same NVLinks, the same adapters."""
    part = NCCL[NCCL.index("    <pci busid") : NCCL.index("  </cpu>")]
    parts = "".join(
        part.replace('"0000:', f'"{n:04d}:').replace("0000:c", "0000:c")
        .replace("mlx5_0", f"mlx5_{n}").replace('rank="1"', f'rank="{n}"')
        for n in range(8)
    )  # fmt: skip
    found, _ = read(tmp_path, f'<system version="1"><cpu numaid="0">{parts}</cpu></system>', ":2")
    known = named_topology("dgx_a100", boxes=2)
    assert found.num_ranks == known.num_ranks
    for topology, names in ((found, ("nvswitch", "mlx5_3")), (known, ("nvswitch0", "gpu3"))):
        assert rate(topology, "box1/gpu3", f"box1/{names[0]}") == 300e9
        out = [
            x for x in topology.links if x.source == f"box1/{names[1]}" and "box1" not in x.target
        ]
        assert sum(link.capacity_bytes_per_s for link in out) == 25e9


def test_a_file_with_pcie_only_asks_for_what_drivers_know(tmp_path):
    bare, reading = read(tmp_path, PCIE_ONLY)
    assert [note.name for note in reading.decisive()] == ["nvlinks"]
    assert not any(node.kind == "nvswitch" for node in bare.nodes)
    told, _ = read(tmp_path, PCIE_ONLY, ",nvlinks=12")
    assert rate(told, "gpu0", "nvswitch") == 300e9
    with pytest.raises(ConfigurationError, match="does not say what the adapter nic0 carries"):
        read(tmp_path, PCIE_ONLY, ":2")


def test_a_matrix_of_nvidia_smi_becomes_its_links(tmp_path):
    found, reading = read(tmp_path, "GPU0\n" + SMI)  # a name alone is no header
    assert found.num_ranks == 4
    # Four A100 joined directly: three times four of a GPU's twelve NVLinks of 25 GB/s.
    assert rate(found, "gpu0", "gpu3") == 100e9
    assert {note.name for note in reading.decisive()} == {"nvlink", "nvswitch"}
    switched, _ = read(tmp_path, SMI, ",nvswitch=yes,nvlink=50 GB/s")
    assert (
        rate(switched, "gpu2", next(n.name for n in switched.nodes if n.kind == "nvswitch"))
        == 200e9
    )
    # PXB: GPU 0 and adapter 0 hang on one bridge, adapter 1 on another one.
    bridges = {
        name: {link.target for link in found.links if link.source == name} - set(found.ranks)
        for name in ("gpu0", "mlx5_0", "mlx5_1")
    }
    assert bridges["gpu0"] == bridges["mlx5_0"] != bridges["mlx5_1"]
    with pytest.raises(ConfigurationError, match="does not say what the adapter mlx5_0 carries"):
        read(tmp_path, SMI, ":2")


def test_eight_gpus_with_all_links_to_each_sit_on_a_switch(tmp_path):
    rows = ["\t" + "\t".join(f"GPU{n}" for n in range(8))]
    rows += [f"GPU{n}\t" + "\t".join("X" if n == m else "NV18" for m in range(8)) for n in range(8)]
    found, reading = read(tmp_path, "\n".join(rows))
    plane = next(node.name for node in found.nodes if node.kind == "nvswitch")
    assert rate(found, "gpu5", plane) == rate(named_topology("dgx_h100"), "gpu5", "nvswitch0")
    assert "nvswitch" not in {note.name for note in reading.decisive()}


def nvswitch_box(*, odd):
    """Eight H100 on NVSwitches, of which one has lost a link."""

    def cell(one, other):
        return "X" if one == other else "NV17" if odd in (one, other) else "NV18"

    rows = ["\t" + "\t".join(f"GPU{n}" for n in range(8))]
    return "\n".join(
        rows + [f"GPU{n}\t" + "\t".join(cell(n, m) for m in range(8)) for n in range(8)]
    )


@pytest.mark.parametrize("odd", [0, 5])
def test_a_box_that_has_lost_a_link_stays_on_its_switch(tmp_path, odd):
    found, reading = read(tmp_path, nvswitch_box(odd=odd))
    plane = next(node.name for node in found.nodes if node.kind == "nvswitch")
    assert [rate(found, f"gpu{n}", plane) / 25e9 for n in range(8)] == [
        17 if n == odd else 18 for n in range(8)
    ]
    assert rate(found, "gpu1", "gpu2") == 0
    assert "nvswitch" not in {note.name for note in reading.decisive()}


def test_what_is_told_of_switches_holds_whatever_the_cells_say(tmp_path):
    pair = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n"
    odd = SMI.replace("GPU2\tNV4\tNV4\t X \tNV4", "GPU2\tNV4\tNV4\t X \tNV3").replace(
        "GPU3\tNV4\tNV4\tNV4", "GPU3\tNV4\tNV4\tNV3"
    )
    for text in (pair, odd):
        switched, _ = read(tmp_path, text, ",nvswitch=yes")
        assert sum(node.kind == "nvswitch" for node in switched.nodes) == 1
        direct, _ = read(tmp_path, text, ",nvswitch=no")
        assert rate(direct, "gpu0", "gpu1") > 0
        assert not any(node.kind == "nvswitch" for node in direct.nodes)


@pytest.mark.parametrize(("model", "gigabytes"), [("908", 46), ("gfx908", 46), ("910", 50)])
def test_a_model_as_rccl_once_wrote_it_says_its_links(tmp_path, model, gigabytes):
    text = re.sub(r' sm="80"', f' sm="94" gcn="{model}"', NCCL).replace("nvlink", "xgmi")
    text = re.sub('target="0000:c.:00.0"', 'target="0000:20:00.0"', text, count=2)
    found, reading = read(tmp_path, text)
    assert rate(found, "amdgpu1", "amdgpu0") == 12 * gigabytes * 1e9
    assert not {note.name for note in reading.decisive()}


def test_a_dump_of_rccl_is_of_amd_s_gpus(tmp_path):
    text = re.sub(r' sm="80"', ' sm="94" gcn="gfx942"', NCCL).replace("nvlink", "xgmi")
    text = re.sub(
        r'target="0000:c.:00.0" count="6" tclass="0x068000"',
        'target="0000:20:00.0" count="1"',
        text,
        count=1,
    )
    found, _ = read(tmp_path, text)
    assert rate(found, "amdgpu1", "amdgpu0") == 64e9  # MI300X: seven links of 64 GB/s
    assert software_of(found).key == "rccl"


def test_bridges_of_one_address_stay_two(tmp_path):
    text = NCCL.replace('0000:20:00.0" class="0x030200', '0000:10:00.0" class="0x030200')
    twice = text.replace("</cpu>", '<pci busid="0000:10:00.0" class="0x060400"/></cpu>', 1)
    found, _ = read(tmp_path, twice)
    assert sum(node.name.startswith("pci 0000:10:00.0") for node in found.nodes) == 2


def test_a_cloud_s_file_without_nvlinks_may_be_told_them(tmp_path):
    text = re.sub(r"\s*<nvlink.*", "", NCCL)
    _, reading = read(tmp_path, text)
    assert "nvlinks" in {note.name for note in reading.decisive()}
    found, _ = read(tmp_path, text, ",nvlinks=12")
    assert rate(found, "gpu1", "nvswitch") == 300e9


def test_columns_that_ran_into_one_another_are_told_apart(tmp_path):
    """As terminals and issue forms leave wide matrices."""
    glued = SMI.replace("NIC0\tNIC1\tCPU", "NIC0NIC1CPU").replace("PXB\tSYS\t", "PXBSYS ")
    assert glued != SMI
    assert read(tmp_path, glued)[0] == read(tmp_path, SMI)[0]


def test_an_empty_cpu_affinity_does_not_shift_the_numa_domain(tmp_path):
    two = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-3\t1\nGPU1\tNV4\t X \t\t1\n"
    found, _ = read(tmp_path, two)
    assert any(node.name.startswith("node") for node in found.nodes)  # one domain, not two sockets
    assert not any(node.name.startswith("sys") for node in found.nodes)


def test_ibstat_says_what_the_adapters_carry(tmp_path):
    (tmp_path / "ib.txt").write_text(IBSTAT)
    found, reading = read(tmp_path, SMI, f":2,ibstat={tmp_path / 'ib.txt'}")
    assert rate(found, "box0/mlx5_0", "fabric") == 25e9
    assert rate(found, "box0/mlx5_1", "fabric") == 0
    assert "mlx5_1" in {note.name for note in reading.left_out}


@pytest.mark.parametrize(
    ("text", "told", "words"),
    [
        (NCCL, ",chunk=1MB", "takes no 'chunk'"),
        (NCCL, ",nvlinks=4", "nvlinks= changes nothing"),
        (NCCL, ",nvswitch=yes", "takes no 'nvswitch'"),
        (NCCL, ",nic=400", "nic=: .*400"),
        (NCCL, ":2,nics=mlx5_9", "no adapter 'mlx5_9'"),
        (NCCL, ",nic", "has no key or no value"),
        (NCCL, ",nic=1GB/s,nic=2GB/s", "says its nic twice"),
        (NCCL.replace("</system>", ""), "", "no XML"),
        (NCCL.replace('count="6"', 'count="six"', 1), "", "line 6, <nvlink>: count='six'"),
        (NCCL.replace('rank="1"', 'rank="0"'), "", "two GPUs have one rank"),
        ("<system><cpu><pci busid='0000:00:1b.0'/></cpu></system>", "", "names no GPU"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>' + NCCL, "", "document type"),
        ("<graphs version='1'/>", "", "graph dump"),
        ("<algo/>", "", "algorithm in MSCCL"),
        ("step,loss\n1,2\n", "", "of no kind that is known"),
        (SMI.replace("GPU3\tNV4", "GPU7\tNV4", 1), "", "no row of GPU3"),
        (SMI.replace("GPU3\tNV4\tNV4", "GPU3\tNV4\tNV2"), "", "and back it is"),
        (SMI.replace("PXB\tSYS\t0-31", "QPI\tSYS\t0-31", 1), "", "legend does not have"),
        (SMI.replace("\tPXB\tSYS\t0-31\t0\t\tN/A\nGPU1", "\nGPU1"), "", "has 4 of 6 cells"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(tmp_path, text, told, words):
    with pytest.raises(FivefoldError, match=words):
        read(tmp_path, text, told)


def test_content_decides_and_not_the_ending(tmp_path):
    assert read(tmp_path, NCCL, name="a.toml")[0] == read(tmp_path, NCCL, name="b.txt")[0]
    assert read(tmp_path, 'generate = "ring:3"', name="c.txt") == (parse_topology("ring:3"), None)
    with pytest.raises(ConfigurationError, match=r"given\.xm does not exist"):
        parse_topology(str(tmp_path / "given.xm"))


# The law: whatever stands in a file has exactly one place in the account, or the file is refused.


def lists_of(reading):
    return [
        {note.name for note in notes}
        for notes in (reading.read, reading.assumed, reading.left_out, reading.harmless)
    ]


TAGS = ("cpu", "pci", "gpu", "nvlink", "nic", "net", "c2c", "pcilink", "foo")
KEYS = ("busid", "class", "link_speed", "speed", "count", "dev", "rank", "guid", "zzz", "rail")


@st.composite
def changed_xml(draw):
    """Elements and attributes of a dump: shuffled, cut, doubled, put elsewhere, or unknown."""
    lines = NCCL.splitlines()[1:-1]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(lines) - 1))
        what = draw(st.sampled_from(("attribute", "drop", "element", "value")))
        if what == "attribute":
            key = draw(st.sampled_from(KEYS))
            lines[place] = re.sub(rf' {key}="[^"]*"', "", lines[place])
            lines[place] = re.sub(
                r"<(\w+)", rf'<\1 {key}="{draw(st.integers(0, 99))}"', lines[place], count=1
            )
        elif what == "drop":
            lines[place] = re.sub(r' \w+="[^"]*"', "", lines[place], count=1)
        elif what == "element":
            lines.insert(
                place, f"<{draw(st.sampled_from(TAGS))} busid='{draw(st.integers(0, 9))}'/>"
            )
        else:
            lines[place] = re.sub(r'="[^"]*"', '="7"', lines[place], count=1)
    return "\n".join(["<system version='1'>", *lines, "</system>"])


@given(text=changed_xml())
def test_every_element_and_attribute_of_a_dump_has_one_place(tmp_path_factory, text):
    try:
        _, reading = read(tmp_path_factory.getbasetemp(), text)
    except FivefoldError:  # a refusal says which line
        return
    lists = lists_of(reading)
    names = [name for one in lists for name in one]
    assert len(names) == len(set(names))
    missplaced = {name.split("/")[-1] for name in lists[2] if "/" in name}
    for tag in set(re.findall(r"<([a-z]\w*)", text)):
        assert sum(tag in one for one in lists) == 1 or tag in missplaced, tag
    for tag, rest in re.findall(r"<([a-z]\w*)([^>]*)", text):
        if tag in missplaced:
            continue
        for key in re.findall(r"(\w+)=", rest):
            assert sum(f"{tag}@{key}" in one for one in lists) == 1, (tag, key)


@given(seed=st.randoms(use_true_random=False))
def test_every_line_of_a_matrix_has_one_place(tmp_path_factory, seed):
    lines = SMI.splitlines()
    extra = [
        "GPU 0: A100",
        "$ nvidia-smi topo -m",
        "NIC9: mlx5_9",
        "bond0 = what",
        "\x1b[4mnote\x1b[0m",
    ]
    for line in seed.sample(extra, seed.randint(0, len(extra))):
        lines.insert(seed.randint(0, len(lines)), line)
    if seed.random() < 0.3:
        lines.pop(seed.randint(0, len(lines) - 1))
    try:
        _, reading = read(tmp_path_factory.getbasetemp(), "\n".join(lines))
    except FivefoldError:  # a row is missing
        return
    names = [name for one in lists_of(reading) for name in one]
    assert len(names) == len(set(names))
    for number, line in enumerate(lines, start=1):
        device = (line.split() or [""])[0]
        known = {f"line {number}", f"row {device}"} & set(names)
        assert len(known) == 1 or not line.split() or "GPU0\tGPU1" in line


@functools.cache
def times_s(text, folder):
    """Return the times of three collectives on two such boxes."""
    found, _ = read(folder, text, ":2")
    fabric, group = fabric_from_topology(found, hop_s=0.0, base_s=0.0), Group(size=found.num_ranks)
    kinds = ("all_reduce", "all_gather", "all_to_all")
    return [collective_time_s(fabric, kind, size_bytes=1e8, group=group) for kind in kinds]


@settings(max_examples=number_of(15, 300))  # each example is a new file to find flows in
@given(place=st.integers(0, 40), factor=st.sampled_from((2, 4, 16)))
def test_a_slower_link_of_a_file_never_gives_a_faster_answer(tmp_path_factory, place, factor):
    numbers = [*re.finditer(r'(count|speed|link_speed|link_width)="(\d+)', NCCL)]
    chosen = numbers[place % len(numbers)]
    less = max(int(chosen[2]) // factor, 1)
    less = {8: 5, 4: 2.5, 1: 2.5}.get(less, less) if chosen[1] == "link_speed" else less
    slow = NCCL[: chosen.start(2)] + str(less) + NCCL[chosen.end(2) :]
    before, after = (times_s(text, tmp_path_factory.getbasetemp()) for text in (NCCL, slow))
    assert all(b >= a * (1 - 1e-6) for a, b in zip(before, after, strict=True))


ASTRA = """# three dimensions
topology: [ Ring, FullyConnected, Switch ]
npus_count: [ 4, 3, 2 ]
bandwidth: [ 200.0, 100.0, 50.0 ]  # GB/s
latency: [ 50.0, 500.0, 2000.0 ]  # ns
"""
TACCL = """{"name": "pair", "gpus_per_node": 2, "alpha": 0.5, "links": [[0, 1], [1, 0]],
 "betas": [[0, 10], [10, 0]], "invbws": [[0, 10.5], [10.5, 0]], "comment": "ours"}"""


def test_a_network_of_astra_sim_has_its_dimensions(tmp_path):
    found, reading = read(tmp_path, ASTRA + "extra: 1\n")
    gb = 2**30  # NetworkFunction.cc of the analytical backend
    assert found.num_ranks == 24
    # Neighbours of NPU 0: 1 and 3 on the ring, 4 and 8 in the second dimension, a switch.
    ends = {link.target: link for link in found.links if link.source == "npu0"}
    assert set(ends) == {"npu1", "npu3", "npu4", "npu8", "dim2/switch0"}
    assert ends["npu3"].bandwidth_bytes_per_s == 200 * gb
    assert ends["npu8"].bandwidth_bytes_per_s == 100 * gb
    assert ends["npu8"].latency_s == pytest.approx(5e-7)
    across = {link.target for link in found.links if link.source == "dim2/switch0"}
    assert across == {"npu0", "npu12"}
    assert [note.name for note in reading.left_out] == ["extra"]
    assert found.hosts["host1"] == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Ring", "Torus2D", "has the dimension 'Torus2D'"),
        ("[ 4, 3, 2 ]", "[ 4, 3 ]", "several lengths: topology 3, npus_count 2"),
        ("100.0", "0", "bandwidth of .* has 0"),
        ("100.0", "fast", "bandwidth of .* has 'fast'"),
        ("500.0", "-1", "latency of .* has -1"),
        ("latency:", "delay:", "has no latency"),
        ("[ 4, 3, 2 ]", "[ 4096, 3, 4096 ]", "50,331,648 NPUs"),
        ("[ 200.0,", "[ 200.0, [", "is not YAML"),
        (
            "latency:",
            "bandwidth: [ 1, 1, 1 ]\nlatency:",
            "has the key 'bandwidth' twice, in lines 4",
        ),
        ("[ 200.0,", "[" * 9000, "nested too deeply"),
        ("[ 4, 3, 2 ]", "[ 1, 65536, 1 ]", "4,294,901,760 links"),
    ],
)
def test_a_network_of_astra_sim_that_does_not_fit_is_refused(tmp_path, old, new, words):
    with pytest.raises(FivefoldError, match=words):
        read(tmp_path, ASTRA.replace(old, new, 1))


def test_one_box_of_taccl_needs_no_times_between_boxes(tmp_path):
    found, reading = read(tmp_path, TACCL, ",chunk=1 MB")
    assert rate(found, "gpu0", "gpu1") == pytest.approx(1e6 / 10e-6)
    assert [note.name for note in reading.left_out] == ["comment"]
    assert assumed(reading) == {"time_scale": "1.0"}
    path = tmp_path / "given.any"
    assert parse_topology(f"taccl:{path},chunk=1 MB") == found
    assert str(path) in found.source
    assert "github" not in found.source.lower()  # that is where the shipped ones come from
    assert "GitHub" in parse_topology("taccl:ndv2_1MB").source
    with pytest.raises(ConfigurationError, match=r"how large a chunk.*,chunk=1 MiB"):
        read(tmp_path, TACCL)
    with pytest.raises(FivefoldError, match="is of one box: it has no remote_alpha"):
        read(tmp_path, TACCL, ":2,chunk=1 MB")
    remote = TACCL.replace(
        '"name"', '"remote_alpha": 1, "remote_beta": 50, "remote_invbw": 51, "name"'
    )
    two, _ = read(tmp_path, remote, ":2,chunk=1 MB,connections=direct-map,time_scale=10")
    assert rate(two, "box0/gpu1", "box1/gpu1") == pytest.approx(1e6 / 10e-6)  # two share a NIC


@given(
    keys=st.dictionaries(
        st.sampled_from(("zeta", "links-count", "note", "dimension-type")), st.integers(0, 9)
    ),
    order=st.permutations(ASTRA.splitlines()),
    cut=st.integers(0, 8),
)
def test_every_key_of_a_network_has_one_place(tmp_path_factory, keys, order, cut):
    lines = [*order, *(f"{key}: {value}" for key, value in keys.items())]
    lines = lines[: len(lines) - (cut if cut < 3 else 0)]
    try:
        _, reading = read(tmp_path_factory.getbasetemp(), "\n".join(lines))
    except FivefoldError:  # a key is missing
        return
    for line in lines:
        key = line.partition(":")[0]
        if not line.startswith("#"):
            assert sum(key in one for one in lists_of(reading)) == 1


HWLOC = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0"><object type="Machine" os_index="0" gp_index="1">
 <info name="Backend" value="Linux"/>
 <object type="Package" os_index="0" cpuset="0x1">
  <object type="NUMANode" os_index="0"><page_type size="4096" count="1"/></object>
  <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[00-0f]">
   <object type="Bridge" bridge_type="1-1" pci_busid="0000:01:00.0"
     pci_type="0604 [1:2] [0:0] 00" pci_link_speed="31.5">
    <object type="PCIDev" pci_busid="0000:02:00.0"
     pci_type="0302 [10de:20b0] [10de:134f] a1" pci_link_speed="31.5">
     <object type="OSDev" name="cuda1" subtype="CUDA" osdev_type="5"/></object>
    <object type="PCIDev" pci_busid="0000:03:00.0"
     pci_type="0207 [15b3:101b] [15b3:7] 00" pci_link_speed="31.5">
     <object type="OSDev" name="mlx5_0" osdev_type="3"/></object>
   </object>
   <object type="PCIDev" pci_busid="0000:04:00.0"
     pci_type="0300 [1d0f:1111] [0:0] 00" pci_link_speed="0.0"/>
  </object></object>
 <object type="Package" os_index="1">
  <object type="Bridge" bridge_type="0-1" depth="0">
   <object type="PCIDev" pci_busid="0000:82:00.0"
     pci_type="0302 [10de:20b0] [10de:134f] a1" pci_link_speed="15.75">
    <object type="OSDev" name="cuda0" subtype="CUDA" osdev_type="5"/></object>
  </object></object>
</object></topology>"""


def test_groups_of_lstopo_that_have_no_number_stay_apart(tmp_path):
    text = re.sub(r'type="Package" os_index="."', 'type="Group"', HWLOC)
    found, reading = read(tmp_path, text)
    tops = [node.name for node in found.nodes if node.name.startswith("group")]
    assert len(tops) == 2
    assert rate(found, *tops) == 16e9
    assert "rates of PCIe" in {note.name for note in reading.assumed}
    _, told = read(tmp_path, text, ",pcie=32 GB/s")
    assert "rates of PCIe" not in {note.name for note in told.assumed}


def test_gpus_of_amd_s_in_lstopo_are_priced_as_rccl(tmp_path):
    text = HWLOC.replace("10de:20b0", "1002:740f").replace('"cuda', '"rsmi')
    found, _ = read(tmp_path, text)
    assert found.ranks == ("amdgpu0", "amdgpu1")
    assert software_of(found).key == "rccl"
    assert rate(found, "amdgpu1", "pci 0000:01:00.0") == 31.5e9  # rsmi1 is the first of the file


def test_a_file_of_lstopo_becomes_its_pcie(tmp_path):
    found, reading = read(tmp_path, HWLOC, ",nvlinks=12")
    assert found.ranks == ("gpu0", "gpu1")
    assert rate(found, "gpu1", "pci 0000:01:00.0") == 31.5e9  # cuda1 is the first of the file
    assert rate(found, "gpu0", "package1") == 15.75e9
    assert rate(found, "pci 0000:01:00.0", "package0") == 31.5e9
    assert rate(found, "package0", "package1") == 16e9
    assert rate(found, "gpu0", "nvswitch") == 300e9
    assert "PCIDev 0000:04:00.0" in {note.name for note in reading.left_out}
    names = [name for one in lists_of(reading) for name in one]
    for tag, rest in re.findall(r"<([a-z]\w*)([^>]*)", HWLOC):
        for name in (tag, *(f"{tag}@{key}" for key in re.findall(r"(\w+)=", rest))):
            assert names.count(name) == 1, name
    two, _ = read(tmp_path, HWLOC, ":2,nic=200 Gbit/s")
    assert rate(two, "box0/mlx5_0", "fabric") == 25e9
    with pytest.raises(ConfigurationError, match="what the adapter mlx5_0 carries"):
        read(tmp_path, HWLOC, ":2")
    with pytest.raises(FivefoldError, match="no GPU of NVIDIA"):
        read(tmp_path, HWLOC.replace("0302", "0106"))
    with pytest.raises(FivefoldError, match="pci_link_speed='fast'"):
        read(tmp_path, HWLOC.replace("15.75", "fast"))
