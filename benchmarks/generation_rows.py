"""SQL statements that fill the table with ended generations."""

_COLUMNS = """public_id, kind, project_id, api_key_id, model, request_id, service_class, streamed,
    background, end_user, ignored_params, status, worker, attempt, created_at, claimed_at,
    first_token_at, finished_at, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
    prefill_ms, decode_ms, cost, reserved_tokens, reserved_cost, is_accounted, preferred_worker,
    finish_reason, error_code"""


def insert_ended(select: str, *more: str) -> str:
    """Return an ``INSERT … SELECT`` of generations, with the columns ``more`` at its end."""
    return f"INSERT INTO generations_generation ({', '.join((_COLUMNS, *more))})\n{select}"
