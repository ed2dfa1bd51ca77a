"""The web page at `/` of the REST port: views, live figures, sign-in. Its scripts make changes over REST."""
