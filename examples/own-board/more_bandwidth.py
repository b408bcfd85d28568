"""An L40S with twice the memory bandwidth, as a file that every command takes for a board."""

from pathlib import Path

import hal

text = (Path(hal.__file__).parent / "devices" / "l40s.toml").read_text()
for old, new in (
    ('name = "l40s"', 'name = "l40s-fast"'),
    ('title = "NVIDIA L40S"', 'title = "L40S, twice the bandwidth"'),
    ("bandwidth_bytes_per_second = 725e9", "bandwidth_bytes_per_second = 1450e9"),
):
    assert text.count(old) == 1
    text = text.replace(old, new)
Path("l40s-fast.toml").write_text(text)
