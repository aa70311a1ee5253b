"""Settings of the admin's theme, django-unfold."""

_TEAL = {
    "50": "oklch(98.4% .014 180.72)",
    "100": "oklch(95.3% .051 180.801)",
    "200": "oklch(91% .096 180.426)",
    "300": "oklch(85.5% .138 181.071)",
    "400": "oklch(77.7% .152 181.912)",
    "500": "oklch(70.4% .14 182.503)",
    "600": "oklch(51.1% .096 186.391)",
    "700": "oklch(43.7% .078 188.216)",
    "800": "oklch(38.6% .063 188.416)",
    "900": "oklch(32.8% .052 189.1)",
    "950": "oklch(27.7% .046 192.524)",
}
"""Colours of links and buttons; white text on shade 600 has enough contrast."""

UNFOLD = {
    "SITE_TITLE": "Inference site",
    "SITE_HEADER": "Inference site",
    "SITE_URL": None,  # No link: the site is an API.
    "SITE_SYMBOL": "hub",
    "SITE_FAVICONS": [
        {
            "rel": "icon",
            "type": "image/svg+xml",
            "href": "inference_site.console.navigation.favicon",
        },
    ],
    "LOGIN": {"form": "inference_site.console.people.login.LoginForm"},
    "STYLES": ["inference_site.console.navigation.stylesheet"],
    "SCRIPTS": ["inference_site.console.navigation.landmarks"],
    "SIDEBAR": {"navigation": "inference_site.console.navigation.navigation"},
    "COLORS": {"primary": _TEAL},
}
