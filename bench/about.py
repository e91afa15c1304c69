"""What the page says of each section about loading and checkpoints, before its numbers."""

from __future__ import annotations

from collections.abc import Mapping

LOADING_SECTIONS: Mapping[str, str] = {
    "load": """\
## Yard.load

A model of bf16 tensors in a yard in HDFS, one copy, by `Yard.load(ref, cache=False)`: the ref
resolved, placements asked of the registry, packs located, bytes read, checked and decoded into
new tensors. Raw and planes are two stores that share nothing. The peers read the same model as one
file, into new memory too, and hand it to the loader that people use. *Views* is the best that can
be made of a peer by hand: several threads read parts of the file, and the tensors are cut from them
without a copy and without a check. The limit receives as many bytes from a socket, into new memory.
The trained weights are those of a real model, over and over, each time moved on, so that no two
blocks are equal. *On this host*: those who can, take the short circuit to a DataNode's files.""",
    "link": """\
## A narrow link

The same by proxies in front of the DataNodes that together pass so many bytes a second. They run on
the same cores, and count under *others*: where raw does not use most of the link, the machine is
the limit and not the link.""",
    "node": """\
## The second load on a node

`Yard.load` where this node has a snapshot, against `safetensors.torch.load_file` of the same file.
Both map it; ours also asks the registry what the ref means, and looks whether the files are whole.
*First use* is the first element of the first tensor, a hundred times over in each repetition; for
*the last byte* one of every page is read. The very first load of a process, which imports what it
needs, is not among them, of either.""",
    "local": """\
## The embedded default

Packs in a folder of a local disk, in the page cache, against those who read a file there; until a
byte of every page was read. `load_file` maps: it copies nothing and checks nothing, and nothing can
be as fast that does: *xxh3* only maps the file and sums it. *Copied*: into memory of the process's
own, as all others have it in the end. Ours, of raw blocks, are mapped out of the packs, which this
node has checked before; with `cache=False` they are checked again.""",
    "swap": """\
## Following

A model is served, a version of which one block in twenty differs is published, the alias moves. The
time is from the move until the new version is served, asking every 0.02 s, by a follower that went
to another version and back before. The values differ in their last bit, one in ten. *Delta beside*:
the version was pushed with `delta="also"`. MB/s are of the whole model, served anew.""",
    "rank": """\
## A rank's half

What one of two ranks loads: half of every tensor, along the first dimension.""",
    "stream": """\
## One after the other

`Yard.stream`, every tensor kept, against `Yard.load`.""",
    "faults": """\
## A DataNode fails in the middle of a load

Three DataNodes, three copies. When a third of the model has come, one DataNode is killed, or
stopped so that its connections stay open and nothing comes any more; in turns with loads that
nothing disturbs. Each is in a rack of its own, and the reader in that of the one that fails, so
that it reads from that one. It is started again before the next load.""",
    "checkpoints": """\
## Checkpoints

A dense fp32 training state, weights and both moments of AdamW, sharded by rows over the ranks of a
job: the first checkpoint of a run, and reading it into tensors that are there, by the same ranks.
*Stock* is torch's own writer and reader, `FsspecWriter` and `FsspecReader`, on `hdfs://` through
hdfs-native, as they are by default; hdfs-native's files are helped to tell their position, to be
closed twice and to read into memory, without which nothing works. Client CPU is of all ranks
together, memory of the hungriest. What bounds the save is the cores: ranks hash every byte and the
DataNodes write each once, on the same ones. Dense fp32 would become a sixth smaller by encoding,
which takes longer than to store that sixth: checkpoints leave it as it is.
What was loaded is compared with what was saved, every value.""",
}
"""By the section's name in `Results`, in the page's order."""
