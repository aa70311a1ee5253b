"""Chats on engines that only complete text; only ``worker.engines`` imports it."""
