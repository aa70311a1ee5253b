"""Admin of responses, conversations and prompt templates; Django's autodiscovery imports it."""

from responses_api.admin.approvals import McpApprovalAdmin
from responses_api.admin.prompts import PromptTemplateAdmin
from responses_api.admin.responses import ConversationAdmin, StoredResponseAdmin

__all__ = [
    "ConversationAdmin",
    "McpApprovalAdmin",
    "PromptTemplateAdmin",
    "StoredResponseAdmin",
]
