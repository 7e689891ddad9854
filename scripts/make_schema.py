"""Write the JSON schema of recipes into the package (`make schema`); a test keeps it current."""

import json

from finetune.recipe import json_schema
from finetune.shipped import SCHEMA

SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
print(f"wrote {SCHEMA}")
