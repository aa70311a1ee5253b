"""Shared helpers: chat template rendering and the SentencePiece-style tokenizer.

The tokenizer here reproduces llama.cpp's "llama" (SPM) algorithm exactly: text is
split in characters, then the adjacent pair whose concatenation has the highest
score is merged until no pair is in the vocabulary.  Leftover characters become
<0xNN> byte tokens.  (Verified against both engines by verify.py.)
"""
import heapq
import json
import os

import jinja2

HERE = os.path.dirname(os.path.abspath(__file__))
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
# Control tokens are never printed by the engines; the others must be printed.
CONTROL = [IM_START, IM_END]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>", "<tools>", "</tools>"]


def _raise(msg):
    raise ValueError(msg)


_env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
_env.filters["tojson"] = lambda v, **k: json.dumps(v, ensure_ascii=False)
_env.globals["raise_exception"] = _raise
TEMPLATE_SOURCE = open(os.path.join(HERE, "..", "chat_template.jinja")).read()
_template = _env.from_string(TEMPLATE_SOURCE)


def render(messages, tools=None, think=True, add_generation_prompt=True):
    return _template.render(messages=messages, tools=tools, enable_thinking=think,
                            add_generation_prompt=add_generation_prompt)


class Tokenizer:
    def __init__(self, path=None):
        d = json.load(open(path or os.path.join(HERE, "tokenizer.json")))
        self.tokens, self.types, self.scores = d["tokens"], d["types"], d["scores"]
        self.id = {t: i for i, t in enumerate(self.tokens)}
        self.score = dict(zip(self.tokens, self.scores))
        self.bos = self.id["<s>"]
        self.eos = self.id[IM_END]
        self.byte0 = self.id["<0x00>"]
        # Two characters that never touch inside a token can never be merged, so
        # text can be cut between them and each piece cached.
        self.pairs = {t[i:i + 2] for t, k in zip(self.tokens, self.types)
                      if k != 6 and t not in ("<s>", "<unk>", "</s>") for i in range(len(t) - 1)}
        self.cache = {}

    def _spm(self, word):
        if word in self.id and len(word) == 1:
            return [self.id[word]]
        sym = list(word)
        nxt = list(range(1, len(sym))) + [-1]
        prv = list(range(-1, len(sym) - 1))
        heap = []

        def push(a, b):
            if a < 0 or b < 0:
                return
            s = self.score.get(sym[a] + sym[b])
            if s is not None:
                heapq.heappush(heap, (-s, a, b, sym[a] + sym[b]))
        for i in range(len(sym) - 1):
            push(i, i + 1)
        while heap:
            _, a, b, t = heapq.heappop(heap)
            if not sym[a] or not sym[b] or sym[a] + sym[b] != t or nxt[a] != b:
                continue
            sym[a], sym[b] = t, ""
            nxt[a] = nxt[b]
            if nxt[b] >= 0:
                prv[nxt[b]] = a
            push(prv[a], a)
            push(a, nxt[a])
        out = []
        for s in sym:
            if s:
                if s in self.id:
                    out.append(self.id[s])
                else:
                    out += [self.byte0 + c for c in s.encode()]
        return out

    def encode(self, text, bos=False):
        text = text.replace(" ", "\u2581")
        out = [self.bos] if bos else []
        start, n = 0, len(text)
        for i in range(1, n + 1):
            if i == n or text[i - 1:i + 1] not in self.pairs:
                w = text[start:i]
                ids = self.cache.get(w)
                if ids is None:
                    ids = self.cache[w] = self._spm(w)
                out += ids
                start = i
        return out

    def decode(self, ids):
        b = b""
        for i in ids:
            t = self.tokens[i]
            b += bytes([i - self.byte0]) if self.types[i] == 6 else t.replace("\u2581", " ").encode()
        return b.decode("utf-8", "replace")
