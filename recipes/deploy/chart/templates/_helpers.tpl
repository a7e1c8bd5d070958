{{- define "gptoss.env" -}}
{{- $name := .Values.secret -}}
- {name: VLLM_API_KEY, valueFrom: {secretKeyRef: {name: {{ $name }}, key: api-key}}}
{{- if not .Values.sqlite }}
- {name: GPTOSS_STORE, valueFrom: {secretKeyRef: {name: {{ $name }}, key: store}}}
{{- end }}
{{- if .Values.tools.enabled }}
- {name: GPTOSS_TOOLS_KEY, valueFrom: {secretKeyRef: {name: {{ $name }}, key: tools-key}}}
{{- end }}
{{- if .Values.huggingFaceToken }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ $name }}, key: hf-token}}}
{{- end }}
{{- range $key, $value := .Values.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* One URL for each pod of the tools service: a conversation's notebook is on one of them. */}}
{{- define "gptoss.toolServer" -}}
browser
{{- $tools := printf "%s-tools" .Release.Name }}
{{- if eq (int .Values.tools.replicas) 1 }},service:http://{{ $tools }}:8001
{{- else }}
{{- range until (int .Values.tools.replicas) }},service:http://{{ $tools }}-{{ . }}.{{ $tools }}:8001{{ end }}
{{- end }}
{{- end -}}

{{- define "gptoss.check" -}}
{{- $several := or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled }}
{{- if and $several .Values.sqlite }}{{ fail "sqlite is for one replica: set sqlite=false and the key store of the secret" }}{{ end }}
{{- if and $several (ne .Values.cache.accessMode "ReadWriteMany") }}{{ fail "several replicas share the cache: set cache.accessMode=ReadWriteMany" }}{{ end }}
{{- if and .Values.autoscaling.enabled (not .Values.podMonitor.enabled) }}{{ fail "autoscaling reads vLLM's queue from Prometheus: set podMonitor.enabled=true" }}{{ end }}
{{- if ge (int .Values.shutdown.finish) (int .Values.shutdown.kill) }}{{ fail "shutdown.kill must be longer than shutdown.finish" }}{{ end }}
{{- end -}}
