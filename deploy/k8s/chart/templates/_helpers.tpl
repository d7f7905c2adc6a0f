{{/* Names, variables, volumes and security of the pods; most take a dict of root ($), name and values. */}}

{{- define "agent-r1.labels" -}}
app.kubernetes.io/name: agent-r1
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "agent-r1.metadata" -}}
labels:
  {{- include "agent-r1.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "agent-r1.image" -}}
image: {{ printf "%s%s:%s" .root.Values.image.prefix .values.image (.values.tag | default .root.Values.image.tag) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{- define "agent-r1.config" -}}
{{ if .Values.run.toml }}/config/run.toml{{ else }}{{ .Values.run.config }}{{ end }}
{{- end }}

{{- define "agent-r1.redis-url" -}}
{{- if .Values.redis.enabled -}}
redis://{{ .Release.Name }}-redis:6379/0
{{- else -}}
{{ required "redis.enabled is false: set redis.url to your server" .Values.redis.url }}
{{- end }}
{{- end }}

{{- define "agent-r1.elasticsearch-url" -}}
{{- if .Values.elasticsearch.enabled -}}
http://{{ .Release.Name }}-elasticsearch:9200
{{- else -}}
{{ .Values.elasticsearch.url }}
{{- end }}
{{- end }}

{{/* Variables: of every service, of this kind (own), of the values. One server a pod: [placement] is for one machine. */}}
{{- define "agent-r1.env" -}}
{{- $env := dict
  "AGENT_R1__RUN__ID" .root.Release.Name
  "AGENT_R1__RUN__DIR" (printf "runs/%s" .root.Release.Name)
  "AGENT_R1__RUN__TOKEN_FILE" "/secrets/token"
  "AGENT_R1__REDIS__URL" (include "agent-r1.redis-url" .root)
  "AGENT_R1__REDIS__PASSWORD_FILE" "/secrets/redis-password"
  "AGENT_R1__LEARNER__TRANSPORT" .root.Values.learner.transport
  "AGENT_R1__ENGINE__RANKS" (mul .root.Values.learner.pods .root.Values.learner.ranksPerPod | toString)
  "AGENT_R1__PLACEMENT__ROLLOUT_REPLICAS" "1"
  "HOME" "/cache"
  "HF_HOME" "/cache/huggingface"
  "HF_TOKEN_PATH" "/secrets/hf-token"
  "TOKENIZERS_PARALLELISM" "false"
  "TORCHINDUCTOR_CACHE_DIR" "/cache/torchinductor"
  "USER" "agent"
-}}
{{- with include "agent-r1.elasticsearch-url" .root }}
{{- if and (hasKey $.root.Values.tools "search") (not $.values.class) }}
{{- $_ := merge $env (dict
  "AGENT_R1__TOOLS__SEARCH__BACKEND" "elasticsearch"
  "AGENT_R1__TOOLS__SEARCH__ELASTICSEARCH_URL" .
  "AGENT_R1__TOOLS__SEARCH__INDEX" $.root.Values.elasticsearch.index) }}
{{- end }}
{{- end }}
{{- range $name, $value := mergeOverwrite $env .own .root.Values.env .values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Of a service that listens on port 8001: [TABLE] of run.toml says where. */}}
{{- define "agent-r1.listen" -}}
{{- $prefix := printf "AGENT_R1__%s" (. | upper) -}}
{{ printf "%s__HOST" $prefix }}: "0.0.0.0"
{{ printf "%s__PORT" $prefix }}: "8001"
{{ printf "%s__ADVERTISE_HOST" $prefix }}: auto
{{- end }}

{{/* The pod, apart from its containers. */}}
{{- define "agent-r1.pod" -}}
serviceAccountName: {{ .serviceAccount | default (printf "%s-agent-r1" .root.Release.Name) }}
automountServiceAccountToken: {{ not (empty .serviceAccount) }}
enableServiceLinks: false
shareProcessNamespace: true # the kernel keeps SIGTERM from process 1 until it has a handler
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $.values $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 1000 }}
  runAsGroup: {{ .user | default 1000 }}
  fsGroup: {{ .user | default 1000 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {{ .seccompProfile | default (dict "type" "RuntimeDefault") | toJson }}
  {{- with .appArmorProfile }}
  appArmorProfile: {type: {{ . }}}
  {{- end }}
{{- end }}

{{- define "agent-r1.resources" -}}
{{- $gpus := dict -}}
{{- if .gpus }}{{ $_ := set $gpus "nvidia.com/gpu" .gpus }}{{ end -}}
resources:
  requests: {{ merge (deepCopy $gpus) .values.resources.requests | toJson }}
  limits: {{ merge (deepCopy $gpus) .values.resources.limits | toJson }}
{{- end }}

{{- define "agent-r1.container-security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Volumes of every service of ours; `more` adds those of one kind, as a list of [name, path, volume]. */}}
{{- define "agent-r1.all-volumes" -}}
{{- $all := list
  (list "secrets" "/secrets" (dict "secret" (dict "secretName" .root.Values.secret "defaultMode" 0440)))
  (list "tmp" "/tmp" (dict "emptyDir" dict))
  (list "cache" "/cache" .root.Values.cache) -}}
{{- if .root.Values.run.toml }}
{{- $all = append $all (list "config" "/config" (dict "configMap" (dict "name" (printf "%s-config" .root.Release.Name)))) }}
{{- end }}
{{- toJson (concat $all (.more | default list)) }}
{{- end }}

{{- define "agent-r1.mounts" -}}
volumeMounts:
  {{- range include "agent-r1.all-volumes" . | fromJsonArray }}
  - {name: {{ index . 0 }}, mountPath: {{ index . 1 }}}
  {{- end }}
  {{- with .root.Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "agent-r1.volumes" -}}
volumes:
  {{- range include "agent-r1.all-volumes" . | fromJsonArray }}
  - {{ merge (dict "name" (index . 0)) (index . 2) | toJson }}
  {{- end }}
  {{- with .root.Values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "agent-r1.elasticsearch-user" -}}
- name: AGENT_R1_ELASTICSEARCH_USER
  value: {{ .Values.elasticsearch.user }}
- name: AGENT_R1_ELASTICSEARCH_PASSWORD_FILE
  value: /secrets/elasticsearch-password
{{- end }}

{{/* A Deployment of a service that listens on port 8001.
     Beside root, name and values: args, own (variables), startSeconds, graceSeconds, and where there is one:
     job (of Prometheus), ready (path of the readiness probe), preStop (a command), init (containers), extraEnv (entries), more (volumes). */}}
{{- define "agent-r1.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  {{- include "agent-r1.metadata" . | nindent 2 }}
spec:
  {{- if not .values.autoscaling.enabled }}
  replicas: {{ .values.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: {{ add .startSeconds 600 }}
  strategy: {rollingUpdate: {{ .rollingUpdate | default (dict "maxSurge" 1 "maxUnavailable" 0) | toJson }}}
  selector:
    matchLabels:
      {{- include "agent-r1.labels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "agent-r1.labels" . | nindent 8 }}
        agent-r1/job: {{ .job | default .name }} # as Prometheus calls it
      {{- with .root.Values.run.toml }}
      annotations: {agent-r1/config: {{ sha256sum . | quote }}}
      {{- end }}
    spec:
      {{- include "agent-r1.pod" . | nindent 6 }}
      terminationGracePeriodSeconds: {{ .graceSeconds }}
      {{- with .init }}
      initContainers:
        {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .name }}
          {{- include "agent-r1.image" . | nindent 10 }}
          args: {{ toJson .args }}
          env:
            {{- include "agent-r1.env" . | nindent 12 }}
            {{- with .extraEnv }}
            {{- . | nindent 12 }}
            {{- end }}
          ports: [{name: http, containerPort: 8001}]
          startupProbe:
            httpGet: {path: /healthz, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ div .startSeconds 5 }}
          livenessProbe:
            httpGet: {path: /healthz, port: http}
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 3
          readinessProbe:
            httpGet: {path: {{ .ready | default "/healthz" }}, port: http}
            periodSeconds: 5
            timeoutSeconds: 10
            failureThreshold: 3
          {{- with .preStop }}
          lifecycle: {preStop: {exec: {command: {{ toJson . }}}}}
          {{- end }}
          {{- include "agent-r1.resources" . | nindent 10 }}
          {{- include "agent-r1.container-security" . | nindent 10 }}
          {{- include "agent-r1.mounts" . | nindent 10 }}
      {{- include "agent-r1.volumes" . | nindent 6 }}
{{- end }}
