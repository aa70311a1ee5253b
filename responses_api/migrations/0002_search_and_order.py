"""Words of items are indexed, and lists are in the order of time.

Nothing is locked for long: every index is built beside what is written meanwhile.
"""

import django.contrib.postgres.indexes
from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import migrations, models

# PostgreSQL refuses a vector of more than a mebibyte, which 50,000 characters never come to. The
# project begins with a blank, so that it is no word of any text.
CREATE_WORDS = r"""
CREATE FUNCTION responses_api_item_words(project_id bigint, data jsonb) RETURNS tsvector
LANGUAGE sql IMMUTABLE PARALLEL SAFE COST 1000
RETURN to_tsvector('simple', left((
    SELECT string_agg(found.piece #>> '{}', ' ') FROM (
        SELECT jsonb_path_query(data, '$.content[*].text') AS piece
        UNION ALL SELECT jsonb_path_query(data, '$.content[*].refusal')
        UNION ALL SELECT jsonb_path_query(data, '$.summary[*].text')
        UNION ALL SELECT jsonb_path_query(data, '$.output[*].text')
        UNION ALL SELECT jsonb_path_query(data, '$.output ? (@.type() == "string")')
        UNION ALL SELECT jsonb_path_query(data, '$.name')
        UNION ALL SELECT jsonb_path_query(data, '$.arguments')
        UNION ALL SELECT jsonb_path_query(data, '$.input')
    ) AS found
), 50000)) || array_to_tsvector(ARRAY[' ' || project_id])
"""
DROP_WORDS = "DROP FUNCTION responses_api_item_words(bigint, jsonb)"


class Migration(migrations.Migration):

    atomic = False

    dependencies = [
        ('responses_api', '0001_initial'),
    ]

    operations = [
        migrations.RunSQL(CREATE_WORDS, DROP_WORDS),
        AddIndexConcurrently(
            model_name='item',
            index=django.contrib.postgres.indexes.GinIndex(
                models.Func('project_id', 'data', function='responses_api_item_words'),
                fastupdate=True, gin_pending_list_limit=512, name='item_words',
            ),
        ),
        AddIndexConcurrently(
            model_name='storedresponse',
            index=models.Index(fields=['project', 'created_at', 'id'], name='response_in_time'),
        ),
        AddIndexConcurrently(
            model_name='storedresponse',
            index=models.Index(fields=['project', 'model', 'created_at', 'id'], name='response_of_model'),
        ),
        AddIndexConcurrently(
            model_name='storedresponse',
            index=models.Index(fields=['project', 'status', 'created_at', 'id'], name='response_in_status'),
        ),
        RemoveIndexConcurrently(model_name='storedresponse', name='response_list'),
        RemoveIndexConcurrently(model_name='storedresponse', name='response_by_model'),
        RemoveIndexConcurrently(model_name='storedresponse', name='response_by_status'),
    ]
