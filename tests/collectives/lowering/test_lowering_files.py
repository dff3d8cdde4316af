"""MSCCL XML and MSCCL++ plans: out, in again, and damaged."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.collectives.algorithms import build_algorithm
from fivefold.collectives.lowering import (
    check_program,
    from_msccl_xml,
    interpret,
    lower,
    to_msccl_xml,
    to_mscclpp_json,
)
from fivefold.collectives.schedules import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    custom_collective,
    named_collective,
    reduce_scatter,
)
from fivefold.errors import (
    ConfigurationError,
    DataError,
    FivefoldError,
    InfeasibleError,
    UnsupportedError,
)

CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "recursive_doubling"),
    ("all_reduce", "double_binary_tree"),
    ("all_gather", "bruck"),
    ("reduce_scatter", "pat"),
    ("all_to_all", "pairwise"),
    ("broadcast", "binary_tree"),
]


def program_of(name, algorithm, ranks=4, **options):
    return lower(build_algorithm(algorithm, named_collective(name, ranks)), **options)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
@pytest.mark.parametrize("options", [{}, {"fuse": False, "channels": 2}], ids=["fused", "plain"])
def test_xml_comes_back_the_same(name, algorithm, options):
    program = program_of(name, algorithm, **options)
    assert from_msccl_xml(to_msccl_xml(program)) == program


@pytest.mark.parametrize("name", ["reduce", "gather", "scatter"])
def test_rooted_collectives_keep_their_root(name):
    program = lower(build_algorithm("direct", named_collective(name, 3, root=2)))
    again = from_msccl_xml(to_msccl_xml(program))
    assert again.collective == program.collective
    check_program(again)


def test_xml_has_every_attribute_that_the_parser_asks_for():
    text = to_msccl_xml(program_of("reduce_scatter", "ring"))
    head = text.splitlines()[0]
    for attribute in (
        'nchunksperloop="4"',
        'nchannels="1"',
        'ngpus="4"',
        'proto="Simple"',
        'coll="reducescatter"',
        'inplace="0"',
        'outofplace="1"',
        'minBytes="0"',
        'maxBytes="0"',
    ):
        assert attribute in head
    step = next(line for line in text.splitlines() if "<step" in line)
    names = "s,type,srcbuf,srcoff,dstbuf,dstoff,cnt,depid,deps,hasdep"
    for name in names.split(","):
        assert f' {name}="' in step


def test_who_is_waited_for_says_so():
    program = program_of("all_reduce", "recursive_doubling", in_place=True)
    text = to_msccl_xml(program)
    awaited = text.count('hasdep="1"')
    waits = {
        (rank, op.wait_block, op.wait_step)
        for rank, _, block in program.blocks()
        for op in block.operations
        if op.wait_block >= 0
    }
    assert awaited == len(waits) > 0


_OLD = """<?xml version="1.0"?>
<!-- as older tools wrote them -->
<algo name="old" nchunksperloop="2" nchannels="1" proto="Simple" inplace="0" ngpus="2"
      coll="reduce_scatter">
  <gpu id="1" i_chunks="2" o_chunks="1" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <op step="0" s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1"
          depid="-1" deps="-1" hasdep="0"/>
      <op step="1" s="1" type="rrc" srcbuf="i" srcoff="1" dstbuf="o" dstoff="0" cnt="1"
          depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="0" i_chunks="2" o_chunks="1" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <op s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1"
          depid="-1" deps="-1" hasdep="0"/>
      <op s="1" type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1"
          depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>"""


def test_older_files_are_read():
    program = from_msccl_xml(_OLD)
    assert program.collective == reduce_scatter(2)
    check_program(program)
    outputs = interpret(program, [np.array([1, 2]), np.array([10, 20])])
    assert [out.tolist() for out in outputs] == [[11], [22]]


def test_copies_of_older_files():
    text = (
        '<algo name="c" nchunksperloop="1" nchannels="1" ngpus="1" coll="allreduce">'
        '<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0">'
        '<copy i_off="0" o_off="0"/></gpu></algo>'
    )
    check_program(from_msccl_xml(text))


def test_a_file_without_a_collective_needs_to_be_told(tmp_path):
    path = tmp_path / "algo.xml"
    path.write_text(_OLD.replace('coll="reduce_scatter"', ""))
    with pytest.raises(DataError, match="line 3, <algo>: coll='' is none of"):
        from_msccl_xml(path)
    check_program(from_msccl_xml(path, collective=reduce_scatter(2)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<algo", "<algo><algo", "line 3, <algo>"),
        ('cnt="1"', 'cnt="one"', "cnt='one' is no whole number"),
        ('cnt="1"', 'cnt="-1"', "cnt=-1 is not in 0 to"),
        ('type="rrc"', 'type="xyz"', "type='xyz' is none of"),
        ('srcbuf="i"', 'srcbuf="q"', "srcbuf='q' is none of i, o, s"),
        ('send="0"', 'send="9"', "send=9 is not in -1 to 1"),
        ('send="0"', "", "the attribute 'send' is missing"),
        ('gpu id="1"', 'gpu id="0"', "there are two gpus with id 0"),
        ('tb id="0"', 'tb id="3"', "thread block 0 is missing"),
        (' s="1"', ' s="5"', "step 1 is missing"),
        ('ngpus="2"', 'ngpus="3"', "gpu 2 of 3 is missing"),
        ('ngpus="2"', 'ngpus="1"', "line 5, <gpu>: id=1 is not in 0 to 0"),
        ('ngpus="2"', 'ngpus="99999999999"', "is not in 1 to"),
        ("</algo>", "", "no XML"),
        ("<tb ", "<foo/><tb ", "it may not stand here"),
        ('coll="reduce_scatter"', 'coll="allgather"', "where nothing is yet"),
    ],
)
def test_damaged_files_name_the_element_and_the_line(old, new, message):
    text = _OLD.replace(old, new, 1)
    with pytest.raises(DataError, match=message) as caught:
        check_program(from_msccl_xml(text))
    assert "line" in str(caught.value) or "rank" in str(caught.value)


def test_entity_bombs_are_refused():
    bomb = (
        '<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>'
        "<algo>&b;</algo>"
    )
    with pytest.raises(DataError, match="document type or an entity"):
        from_msccl_xml(bomb)
    with pytest.raises(DataError, match="no XML"):
        from_msccl_xml("<algo>&unknown;</algo>")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        from_msccl_xml(tmp_path / "none")


@given(data=st.data())
def test_any_damage_is_a_clear_error_or_a_program(data):
    text = to_msccl_xml(program_of("all_gather", "ring", ranks=3))
    at = data.draw(st.integers(0, len(text) - 1))
    cut = data.draw(st.integers(0, 12))
    put = data.draw(st.text(alphabet='<>"=&/ 0129-ax', max_size=4))
    with suppress(FivefoldError):  # anything else fails the test
        check_program(from_msccl_xml(text[:at] + put + text[at + cut :]))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: program_of("all_gather", "ring", ranks=4, instances=40), "32 channels"),
        (lambda: lower(build_algorithm("direct", all_gather(4, 200)), max_count=2), "64 steps in"),
        (lambda: lower(build_algorithm("direct", all_gather(4, 80)), max_count=80), "71 chunks"),
        (lambda: lower(build_algorithm("ring", all_gather(4, 80)), max_count=1), "steps in block"),
    ],
)
def test_what_msccl_cannot_load_is_refused(program, message):
    with pytest.raises(InfeasibleError, match=message):
        to_msccl_xml(program())
    to_msccl_xml(program(), check_limits=False)


@pytest.mark.parametrize(
    ("target", "chunks", "fits"),
    [("executor", 32, True), ("executor", 33, False), ("executor-256", 33, True),
     ("executor-256", 129, False), ("msccl", 128, True)],
)  # fmt: skip
def test_each_build_has_its_limits(target, chunks, fits):
    """On two ranks a chunk is one step each way, and each rank's one block has both."""
    program = lower(build_algorithm("ring", all_gather(2, 2 * chunks)), max_count=1)
    steps = {len(block.operations) for _, _, block in program.blocks()}
    assert max(steps) == 2 * chunks
    if fits:
        to_msccl_xml(program, target=target)
    else:
        with pytest.raises(InfeasibleError, match=f"{target}.* steps in block"):
            to_msccl_xml(program, target=target)


@pytest.mark.slow
def test_elements_of_all_ranks_count_as_the_parser_counts_them():
    """One for the algorithm, one for each rank, and the own rank's blocks and steps."""
    schedule = build_algorithm("direct", all_gather(60))
    program = lower(schedule)
    text = ET.fromstring(to_msccl_xml(program, target="executor"))  # noqa: S314 - our own
    counts = [1 + 60 + sum(1 + len(block) for block in gpu) for gpu in text]
    assert max(counts) < 4096
    many = lower(build_algorithm("ring", all_gather(2, 2040)), channels=32, max_count=1)
    with pytest.raises(InfeasibleError, match="at most 4095 XML elements"):  # 1 + 2 + 32 + 4080
        to_msccl_xml(many, target="executor-256")


def test_many_peers_are_dealt_over_channels():
    """A channel has 32 senders and 32 receivers at most, by the interpreter's own table."""
    program = lower(build_algorithm("direct", all_to_all(40)), in_place=False)
    assert program.num_channels == 2
    for rank in program.ranks:
        for way in ("send_peer", "receive_peer"):
            peers = Counter(b.channel for b in rank.blocks if getattr(b, way) >= 0)
            assert max(peers.values()) <= 32
    to_msccl_xml(program)


def test_a_target_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match="no target 'other'"):
        to_msccl_xml(program_of("all_gather", "ring"), target="other")


def test_what_mscclpp_cannot_hold_is_refused():
    program = program_of("all_reduce", "ring", ranks=16)
    with pytest.raises(InfeasibleError, match="at most 64 operations"):
        to_mscclpp_json(program)


def test_collectives_without_a_name_there():
    own = lower(build_algorithm("ring", all_gather(2)))
    collective = custom_collective(2, [(0, 0)], post=[(0, 0)])
    program = lower(build_algorithm("ring", broadcast(2)))
    assert to_msccl_xml(program)
    from dataclasses import replace

    idle = replace(own, collective=collective)
    for write in (to_msccl_xml, to_mscclpp_json):
        with pytest.raises(UnsupportedError, match="no collective 'custom'"):
            write(idle)


def test_names_are_quoted():
    from dataclasses import replace

    program = replace(program_of("all_gather", "ring"), name='a "<&> b')
    assert from_msccl_xml(to_msccl_xml(program)).name == 'a "<&> b'


def test_all_to_all_counts_chunks_per_rank():
    text = to_msccl_xml(lower(build_algorithm("direct", all_to_all(3, 2))))
    assert 'nchunksperloop="6"' in text
    assert from_msccl_xml(text).collective == all_to_all(3, 2)
    assert 'nchunksperloop="5"' in to_msccl_xml(lower(build_algorithm("ring", all_reduce(5))))
