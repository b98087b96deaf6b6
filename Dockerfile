# hwopt with the torch of the Python package index, which brings the CUDA libraries. See docs/clusters.md.
FROM python:3.12-slim
# torch.compile and torchao's optimizers compile C++
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir /src && rm -rf /src
WORKDIR /work
ENTRYPOINT ["hwopt"]
