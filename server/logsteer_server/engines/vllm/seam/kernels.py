"""Internals that the kernels for CPUs rely on."""

from logsteer_server.engines.vllm.seam.internal import attributes, row

LINEAR = "vllm.model_executor.kernels.linear"
INT8 = f"{LINEAR}.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"
WNA16 = f"{LINEAR}.mixed_precision.cpu.CPUWNA16LinearKernel"

CPU_KERNELS = (
    row("name", f"{LINEAR}._POSSIBLE_INT8_KERNELS", "", "ours is put there", "cpu_kernels"),
    row("name", f"{LINEAR}._POSSIBLE_KERNELS", "", "ours is put there", "cpu_kernels"),
    row("attribute", "vllm.platforms.PlatformEnum", "CPU", "where kernels stand", "cpu_kernels"),
    row("source", f"{LINEAR}.init_int8_linear_kernel",
         'choose_scaled_mm_linear_kernel(config, _POSSIBLE_INT8_KERNELS, quantization="int8_w8a8")',
         "INT8 layers take the first kernel there that can", "cpu_kernels"),
    row("source", f"{LINEAR}.choose_mp_linear_kernel",
         "platform_kernels = _POSSIBLE_KERNELS.get(current_platform._enum, [])",
         "layers of 4 bits take the first kernel there that can", "cpu_kernels"),
    row("override", f"{INT8}.process_weights_after_loading", "self, layer",
         "INT8 layers are tried as they are loaded", "cpu_kernels"),
    row("call", f"{INT8}.process_weights_for_onednn", "self, layer", "oneDNN's kernel",
         "cpu_kernels"),
    row("call", f"{INT8}._apply_weights_onednn", "self, layer, x", "oneDNN's kernel",
         "cpu_kernels"),
    row("call", f"{INT8}._get_layer_params", "self, layer", "a layer's tensors", "cpu_kernels"),
    *attributes(INT8, "config layer_param_names linear_method dnnl_handler",
                 "an INT8 layer's kernel", "cpu_kernels"),
    row("source", f"{INT8}.apply_weights", "return self.linear_method(layer, x, bias)",
         "how a layer is computed is an attribute of its kernel", "cpu_kernels"),
    row("source", f"{INT8}.process_weights_for_onednn",
         "azp_adj = weight.sum(dim=0, keepdim=True, dtype=torch.float32)\n"
         "azp_adj = azp_adj * weight_scale.squeeze()", "what zero points take away", "cpu_kernels"),
    row("source", f"{INT8}.process_weights_for_onednn",
         "is_fused_module = len(layer.logical_widths) > 1", "a layer to try has it, too",
         "cpu_kernels"),
    row("source", "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model",
         "with set_default_torch_dtype(model_config.dtype):",
         "layers are tried in the dtype of the model", "cpu_kernels"),
    *attributes(f"{LINEAR}.Int8ScaledMMLinearLayerConfig",
                 "is_static_input_scheme input_symmetric", "how activations are quantised",
                 "cpu_kernels"),
    row("call", "vllm._custom_ops.onednn_scaled_int8_quant", "input, scale, azp, symmetric",
         "activations in 8 bits", "cpu_kernels"),
    row("call", f"{WNA16}.can_implement", "c", "float32 is refused there", "cpu_kernels"),
    row("attribute", f"{LINEAR}.MPLinearLayerConfig", "act_type",
         "float32 is refused there", "cpu_kernels"),
)  # fmt: skip
