"""The documents' site: pages and plots that are made from code and results, and what mkdocs needs beside `docs/`."""
