"""GBNF becomes a Lark grammar of the same texts."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from worker.engines.gbnf import lark_of_gbnf

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
"""Two examples of llama.cpp."""


class _Bytes:
    """A vocabulary of the bytes."""

    bos_token_id = None
    tokens = (*(bytes([code]) for code in range(256)), b"<end>")
    eos_token_id = 256
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)


def _matches(tokenizer: LLTokenizer, gbnf: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark_of_gbnf(gbnf)), log_level=0)
    encoded = list(text.encode())
    taken = matcher.try_consume_tokens(encoded)
    return taken == len(encoded) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("gbnf", "texts", "others"),
    [
        (r'root ::= "\x41" [\x42-\x44] "\u00e9" [\u00e0-\u00ff] "\U0001F600"', ["ABéé😀"], ["AB"]),
        (r'root ::= [^\]\n]+ "\t\"\\"', ['ab\t"\\'], ["]"]),
        (r"root ::= [-+*/] [a-] [.^] [^^]", ["--^a", "+a.-"], ["a", "--.^"]),
        ("root ::= . .", ["x\n", "éé"], ["x"]),
        ('root ::= a "b"\na ::= [a-z]+', ["aab", "bb"], ["b", "aaa"]),
        ('root ::= "a"{3} [b]{2,} "c"{0,1}', ["aaabb", "aaabbbc"], ["aabb"]),
        ('root ::= ( | "a") "b" | ', ["ab", "b", ""], ["a"]),
        ('root ::= [a-z]?{3} # comment\n\nunused ::= "x"', ["", "abc"], ["abcd"]),
        ('root ::= foo-bar fooBar\nfoo-bar ::= "x"\nfooBar ::= ("y" |\n "z")', ["xy", "xz"], ["x"]),
        ('root ::= "%json" "&~$/\'`"', ["%json&~$/'`"], []),
        ('root ::= x\nx ::= "(" x ")" | [a-z]* "b"', ["((aab))", "b"], ["((a))", "(b"]),
        (ARITHMETIC, ["a+b=3\n", "(x1*2)=y \n\n"], ["a+b=3"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9"], "b": {}}', "{}\n"], ['{"a": nul}', "[]"]),
    ],
)
def test_the_same_texts_match(
    tokenizer: LLTokenizer, gbnf: str, texts: list[str], others: list[str]
) -> None:
    assert [text for text in texts if not _matches(tokenizer, gbnf, text)] == []
    assert [text for text in others if _matches(tokenizer, gbnf, text)] == []


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("", "no rule 'root'"),
        ("this is no grammar", "belongs to no rule"),
        ('root ::= "a"\n | "b"', "belongs to no rule"),
        ("root ::= 'x'", "cannot read"),
        ("root ::= []", "cannot read"),
        ("root ::= other", "line 1: there is no rule 'other'"),
        ('root ::= a\na ::= "x" other', "line 2: there is no rule 'other'"),
        ('root ::= ("a"', "not closed"),
        ("root ::= )", "follows nothing"),
        ("root ::= *", "follows nothing"),
        (r'root ::= "\q"', "unknown escape"),
        (r'root ::= "\ud83d"', "no character"),
        ('root ::= "a"{1,' + " " * 50_000 + "x", "cannot read"),
        ("root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, "nested"),
    ],
)
def test_what_is_no_gbnf_is_refused(gbnf: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        lark_of_gbnf(gbnf)


def test_a_chain_of_rules_takes_no_long(tokenizer: LLTokenizer) -> None:
    chain = "\n".join(f"r{n} ::= r{n + 1}" for n in range(500))
    assert _matches(tokenizer, f'root ::= r0\n{chain}\nr500 ::= "x"', "x")


def test_tokens_keep_their_names() -> None:
    assert "<think>" in lark_of_gbnf("root ::= <think> [a-z]*")
