"""Reading a report's page."""

import json
import re


def data_of(text: str, key: str):
    found = re.search(rf'<script type="application/json" id="{key}">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])
