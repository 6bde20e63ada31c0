"""See one request happen: drive gdb over libkestrel and show what it stops at.

Reading order: `cli` (the commands), `trace` (one run from start to end), `probes` (what is read at
a stop), `targets` (how a program comes under gdb), `mi` (the conversation with gdb), `records` and
`render` (what a learner gets to see).
"""

__version__ = "0.1.0"
