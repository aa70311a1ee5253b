"""Users of the console: roles, invitations, logins and single sign-on."""
