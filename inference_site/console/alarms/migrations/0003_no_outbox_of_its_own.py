import datetime as dt
import json

from django.db import migrations


def move(apps, schema_editor):
    """Make an endpoint of each recipient, and a message of each notice on its way."""
    endpoints = apps.get_model("outbox", "Endpoint").objects
    messages = apps.get_model("outbox", "Message").objects
    for recipient in apps.get_model("alarms", "Recipient").objects.all():
        endpoint = endpoints.create(
            way=recipient.way,
            address=recipient.address,
            secret=recipient.secret,
            is_enabled=recipient.is_enabled,
        )
        for notice in recipient.notices.filter(next_at__isnull=False).select_related("alarm__rule"):
            alarm = notice.alarm
            event = "alarm.resolved" if notice.is_resolved else "alarm.firing"
            body = {
                "id": f"evt_{notice.public_id}",
                "object": "event",
                "created_at": int(notice.created_at.timestamp()),
                "type": event,
                "data": {
                    "id": alarm.pk,
                    "rule": alarm.rule.kind,
                    "subject": alarm.subject,
                    "text": notice.text,
                    "started_at": alarm.started_at.isoformat(),
                    "resolved_at": alarm.resolved_at and alarm.resolved_at.isoformat(),
                },
            }
            messages.create(
                endpoint=endpoint,
                public_id=notice.public_id,
                event_type=event,
                object_id=f"alarm {alarm.pk}",
                body=json.dumps(body),
                created_at=notice.created_at,
                attempts=notice.attempts,
                next_at=notice.next_at,
                give_up_at=notice.created_at + dt.timedelta(hours=72),
            )


class Migration(migrations.Migration):

    dependencies = [
        ("alarms", "0002_default_rules"),
        ("outbox", "0001_initial"),
    ]

    operations = [
        migrations.RunPython(move, migrations.RunPython.noop),
        migrations.DeleteModel(name="Notice"),
        migrations.DeleteModel(name="Recipient"),
    ]
