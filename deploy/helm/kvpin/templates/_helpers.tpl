{{- define "kvpin.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kvpin.scheme" -}}
{{- $tls := .Values.settings.tls | default dict }}
{{- if $tls.client_ca }}
{{- fail "settings.tls.client_ca: the kubelet's probes have no certificate; ask for clients' at the ingress" }}
{{- end }}
{{- ternary "https" "http" (not (empty $tls)) }}
{{- end }}

{{- define "kvpin.selector" -}}
app.kubernetes.io/name: kvpin
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvpin.labels" -}}
{{ include "kvpin.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
