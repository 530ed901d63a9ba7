"""The web page: planner, runs in progress, privacy cards and the budget ledger, read-only and local by default.

    >>> from hushgrad.serve import Settings
    >>> Settings().is_loopback
    True

| file | what is in it |
|---|---|
| ``settings`` | what is served, and to whom |
| ``fields`` | the planner's form: names, bounds and defaults, for the page, the API and its description |
| ``files`` | reads untrusted run folders |
| ``runs`` | the runs, their progress and their curves |
| ``jobs``, ``worker``, ``worker_queue`` | expensive requests, answered in child processes with limits of time and memory |
| ``access_control`` | who may ask, and the headers of every answer |
| ``pages``, ``api`` | HTML and JSON |
| ``views`` | templates, and errors in both forms |
| ``app`` | the application, and the server around it |
"""

from hushgrad.serve.app import create_app, serve
from hushgrad.serve.settings import Settings

__all__ = ["Settings", "create_app", "serve"]
