# An image of Agent-R1 with a folder of your code in it, as /plugins, and the packages of the folder's
# requirements.txt. IMAGE is the one to build on.
#
#   docker build -f deploy/docker/plugins.Dockerfile --build-arg IMAGE=agent-r1-tools -t my-tools ./my_code
ARG IMAGE
FROM ${IMAGE}
USER root
COPY . /plugins
RUN if [ -f /plugins/requirements.txt ]; then \
        python3 -m pip install -c /lists/lock.txt -r /plugins/requirements.txt; \
    fi
USER agent
