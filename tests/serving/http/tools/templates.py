"""Chat templates with sections for tools, in the shape of those that models come with."""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" + (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501

LLAMA = """\
{%- if tools is not none %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nUse {\\"name\\": ..., \\"parameters\\": ...}.\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n" }}{%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' + (tool_call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""  # noqa: E501

MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == messages[-1] %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("ids of calls have 9 letters") }}
            {%- endif %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]</s>" }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- " " + message.content + "</s>" }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501

MISTRAL_ARGS = """\
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {%- for tool_call in message.tool_calls %}
            {%- set function = tool_call.function %}
            {{- "[TOOL_CALLS]" + function.name + "[ARGS]" + function.arguments }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
"""

UNKNOWN = "{% for tool in tools or () %}({{ tool }}){% endfor %}{{ messages[-1].content }}"
"""Knows tools, and does not tell how calls are written."""

NONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

TEMPLATES = {"hermes": QWEN, "llama": LLAMA, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS}
"""Format -> a template that has it."""
