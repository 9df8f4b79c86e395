"""The same samples in small files, tar shards, one memory-mapped file or TFRecord, with a common interface.

    from helpers.pipelines.formats import FORMATS, Sample, Stream, mapped

    mapped.write(samples, folder, "image")              # samples: Sample(key, label, data), data a JPEG's bytes
    reader = mapped.open_(folder)                       # len(reader), reader[i], reader.stream(), reader.find(label)
    for module in FORMATS.values(): ...                 # each has write, open_ and NEEDS, what must be installed
    webdataset.open_(folder, index="build")             # makes the indexes that are missing

            one sample by position     in order                   a label's positions      to change one sample
files       open, read, close          the same, each             from the table           replace its file
webdataset  one read at an offset      one file a shard           from the index           write its shard
mapped      page faults                the same, read ahead       from the table           write the file
tfrecord    its shard up to it         one file a shard, parsed   by reading every one     write its shard

Damaged data raises a `FormatError` that names file, sample and reason; tfrecord's library verifies no checksum.
"""

from types import ModuleType

from . import mapped, small_files, tfrecord, webdataset
from .dataset import FormatError, Sample
from .stream import ORDERS, Stream, collate

FORMATS: dict[str, ModuleType] = {
    "files": small_files,
    "webdataset": webdataset,
    "mapped": mapped,
    "tfrecord": tfrecord,
}

__all__ = ["FORMATS", "ORDERS", "FormatError", "Sample", "Stream", "collate"]
