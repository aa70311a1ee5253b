"""Health and site-wide metrics; URLs, the doctor and ``manage.py web`` import it."""
