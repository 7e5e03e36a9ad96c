{{- define "kvpin.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
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
