"""GBNF, llama.cpp's own form of grammars, for llguidance."""

from worker.engines.gbnf.lark import lark_of_gbnf

__all__ = ["lark_of_gbnf"]
