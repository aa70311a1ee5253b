"""Wire models of responses; ``responses_api`` and the playground import them."""
