"""Traces for other eyes: one HTML page for people, Chrome trace JSON for ui.perfetto.dev.

spans    which return belongs to which entry, and times without the debugger's pauses
chrome   the Chrome trace, and what must hold for one
story    what happened request by request, in words and rows of the KV cache
words    token text, from a tokenizer
html     the page: page.html, page.css and page.js with the story inside
command  `debugkit export`
"""
