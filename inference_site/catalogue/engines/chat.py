"""What every engine that is adapted for chats has in common."""

from __future__ import annotations

CHAT_OPTIONS = frozenset(
    {
        *("channels", "chat_template", "chat_template_kwargs", "force_enable_thinking"),
        *("reasoning_end", "reasoning_has_calls", "reasoning_header", "reasoning_reenters"),
        *("reasoning_start", "tool_format"),
    }
)


def chat_capabilities(own: frozenset[str]) -> frozenset[str]:
    """Return what requests may ask for of an engine with these capabilities once it is adapted."""
    chat = {"chat", "chat_template", "response_prefix", "tools"}
    return own | chat | ({"render"} if "tokens" in own else set())
